"""Atomic checkpoints, verified by digest, without pickle."""
