"""Low-rank adapters, and their folders."""
