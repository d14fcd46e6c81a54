"""The training loops: the PPO family, supervised fine-tuning, and the demo."""
