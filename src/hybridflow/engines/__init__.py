"""Training engines, which own a module, its optimizer and their state, and know no algorithm."""

from hybridflow.engines.base import BatchLimits, Held, LossFn, TrainEngine
from hybridflow.models.output_spec import OutputSpec

__all__ = ["BatchLimits", "Held", "LossFn", "OutputSpec", "TrainEngine"]
