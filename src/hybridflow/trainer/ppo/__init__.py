"""The PPO family: `step.py` is the algorithm, written once; a schedule (`sync.py`) says where the batch comes
from.
"""
