"""Training engines: they own a module, its optimizer and its checkpoint state, and know nothing of
algorithms.
"""

from hybridflow.engines.base import BatchLimits, ForwardFn, LossFn, TrainEngine

__all__ = ["BatchLimits", "ForwardFn", "LossFn", "TrainEngine"]
