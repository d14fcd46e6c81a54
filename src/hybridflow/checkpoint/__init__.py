"""Atomic checkpoints, verified by digest, without pickle."""

from hybridflow.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]
