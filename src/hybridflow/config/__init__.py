"""The keys of a run: typed, frozen, the only home of defaults. Imports neither torch nor ray.

`load.py` turns a recipe and overrides into one of the two roots; `checks/` refuses what cannot run;
`explain.py` says what follows.
"""

from hybridflow.config.root import PPOConfig, SFTConfig

__all__ = ["PPOConfig", "SFTConfig"]
