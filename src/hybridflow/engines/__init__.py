"""Training engines, which own a module, its optimizer and their state, and know no algorithm."""

from hybridflow.engines.base import BatchLimits, Held, LossFn, TrainEngine
from hybridflow.models.ask import Ask

__all__ = ["Ask", "BatchLimits", "Held", "LossFn", "TrainEngine"]
