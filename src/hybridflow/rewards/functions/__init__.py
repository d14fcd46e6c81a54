"""The built-in reward functions, one a file.

    compute_score(data_source, solution_str, ground_truth, *, options) -> float | {"score": float, ...}

Some also take `extra_info` or `messages`; `RewardFunction.of(compute_score)` may be given all four values
of a row, and passes on what is taken.

Scores are 1.0 for right and 0.0 for wrong unless a function says otherwise; "acc" is what validation averages
as accuracy. `hybridflow.rewards.load` gives them their names.
"""
