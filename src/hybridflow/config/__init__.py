"""The keys of a run: typed, frozen, the only home of defaults. Imports neither torch nor ray.

`load.py` turns a recipe and overrides into one of the roots; `checks/` refuses what cannot run;
`explain.py` says what follows.
"""

from hybridflow.config.preference import DPOConfig, RewardModelConfig
from hybridflow.config.root import PPOConfig, SFTConfig

RUNS: dict[str, type[PPOConfig] | type[SFTConfig]] = {
    "train": PPOConfig,
    "sft": SFTConfig,
    "dpo": DPOConfig,
    "reward-model": RewardModelConfig,
}
"""The root of the keys of each command that trains."""

__all__ = ["RUNS", "DPOConfig", "PPOConfig", "RewardModelConfig", "SFTConfig"]
