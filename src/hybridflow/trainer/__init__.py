"""The training loops: the PPO family and supervised fine-tuning."""
