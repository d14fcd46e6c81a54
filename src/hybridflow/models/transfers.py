"""The page `distributed.transfers`, under the name by which the native engine imports it."""

from __future__ import annotations

from hybridflow.distributed.transfers import HostCopy, to_device

__all__ = ["HostCopy", "to_device"]
