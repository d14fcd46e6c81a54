"""Reward of the sums task: 1 where the last number of the response is the right one."""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 where the last number of the response is the sum, else 0."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1] == ground_truth)
