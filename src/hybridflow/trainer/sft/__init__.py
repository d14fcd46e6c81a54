"""Supervised fine-tuning on the same engine as the actor."""
