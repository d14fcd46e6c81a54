"""Objects of this process have the interface of those in worker processes."""

from __future__ import annotations

import asyncio
import sys

import pytest

from hybridflow.processes import CallRaised, CallTooLong, LocalHosts

LONG = 600.0


class Judge:
    def own_timeout(self) -> None:
        raise TimeoutError("the judge is away")

    def leaves(self) -> None:
        sys.exit(3)

    async def waits(self) -> None:
        await asyncio.sleep(LONG)

    async def answers(self, text: str) -> str:
        return text.upper()


def test_a_call_that_is_late_is_told_from_one_that_raises() -> None:
    async def work() -> None:
        judge = await LocalHosts().create(f"{__name__}:Judge", deadline_s=LONG)
        assert await judge.call("answers", "yes", deadline_s=LONG) == "YES"
        with pytest.raises(CallRaised, match="TimeoutError: the judge is away"):
            await judge.call("own_timeout", deadline_s=LONG)
        with pytest.raises(CallRaised, match="SystemExit: 3"):
            await judge.call("leaves", deadline_s=LONG)
        with pytest.raises(CallTooLong, match="waits ran past its deadline"):
            await judge.call("waits", deadline_s=0.01)

    asyncio.run(work())
