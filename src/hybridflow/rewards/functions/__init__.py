"""The built-in reward functions, one a file, all called alike.

    compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)
        -> float | {"score": float, ...}

Scores are 1.0 for right and 0.0 for wrong unless a function says otherwise; "acc" is what validation averages
as accuracy. `hybridflow.rewards.table` gives them their names.
"""
