"""Environments: what a model talks to, turn by turn."""

from hybridflow.environments.base import Environment, Step

__all__ = ["Environment", "Step"]
