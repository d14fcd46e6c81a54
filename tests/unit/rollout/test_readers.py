"""The threads that read requests: whatever reading raises reaches the request that waits for it."""

from __future__ import annotations

import asyncio

import pytest

from hybridflow.rollout.server.readers import Check, JobReaders


def test_an_exception_that_a_future_refuses_reaches_the_request() -> None:
    def make(check: Check) -> str:
        raise StopIteration("no more turns")

    async def ask() -> str:
        return await asyncio.wait_for(JobReaders(4, lambda: None).run(make, 10), timeout=60)

    with pytest.raises(RuntimeError, match="no more turns"):
        asyncio.run(ask())
