"""Generation engines: token ids in, token ids with their log-probs out."""
