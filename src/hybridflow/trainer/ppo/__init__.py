"""The PPO family: `step.py` is the algorithm, written once; a source (`sync.py`) makes the batches it learns
from.
"""
