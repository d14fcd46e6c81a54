"""Predictions of a run: memory and time of each phase, and the placement that takes least. No torch."""
