"""Training by stages: ranks hold consecutive layers, and micro-batches pass from one to the next (1F1B)."""

from hybridflow.engines.pipeline.engine import PipelineEngine

__all__ = ["PipelineEngine"]
