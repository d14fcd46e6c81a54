"""Time travel: the rows of each step on disk, and what compares, repeats and re-scores runs by them."""
