"""Training engines. An engine owns a module, its optimizer and its checkpoint state; it knows no algorithm."""

from hybridflow.engines.base import BatchLimits, ForwardFn, LossFn, TrainEngine

__all__ = ["BatchLimits", "ForwardFn", "LossFn", "TrainEngine"]
