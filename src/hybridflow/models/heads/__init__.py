"""What an output head gives: log-probs, entropies and exact divergences."""
