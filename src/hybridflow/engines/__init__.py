"""Training engines, which own a module, its optimizer and their state, and know no algorithm."""

from hybridflow.engines.base import BatchLimits, ForwardFn, LossFn, TrainEngine

__all__ = ["BatchLimits", "ForwardFn", "LossFn", "TrainEngine"]
