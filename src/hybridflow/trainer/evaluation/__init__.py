"""Evaluation: a model's answers to held-out prompts, kept one by one, scored, and counted."""
