"""Predictions of a run: memory and time of each phase, and the fastest placement. No torch."""
