"""Hugging Face causal language models as policies and value functions: one attention, one log-prob head."""
