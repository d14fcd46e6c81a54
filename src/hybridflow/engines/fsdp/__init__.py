"""The FSDP2 engine. At world size 1 there is nothing to shard: no wrapping and no process group."""

from hybridflow.engines.fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
