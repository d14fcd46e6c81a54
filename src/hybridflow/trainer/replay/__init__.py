"""Time travel: the rows of each step on disk, and what compares, repeats and judges runs by them."""
