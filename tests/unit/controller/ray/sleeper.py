"""A process that answers as `RankProcess` does and holds no workers. It imports nothing of ours, so it starts
at once.
"""

from __future__ import annotations

import os
import time

import ray


class Sleeper:
    @ray.method(num_returns=2)
    def invoke(self, seconds: float) -> tuple[None, float]:
        time.sleep(seconds)
        return None, seconds

    @ray.method(num_returns=2)
    def freeze(self) -> tuple[None, None]:
        """Hold Python's lock: nothing else in the process gets a turn."""
        import ctypes

        ctypes.PyDLL(None).sleep(600)
        return None, None

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        return os.getpid()

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        return "asleep in invoke"
