"""The FSDP2 engine. On one rank it shards nothing and needs no process group."""

from hybridflow.engines.fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
