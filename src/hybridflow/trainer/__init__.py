"""The loops: PPO and its kin, supervised fine-tuning, the demo."""
