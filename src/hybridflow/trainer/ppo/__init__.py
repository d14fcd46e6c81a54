"""The PPO family: `step.py` is the algorithm, written once; a source of `trainer/schedules` makes the batches
it learns from.
"""
