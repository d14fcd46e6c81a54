"""Weights that rest on the CPU are on the device while somebody reads them, and only then."""

from __future__ import annotations

import pytest

from hybridflow.errors import RolloutError
from hybridflow.weight_sync.reshard import OffloadedSource


class Engine:
    """Counts who wants the parameters on the device."""

    def __init__(self) -> None:
        self.users = 0

    def onload(self) -> None:
        self.users += 1

    def offload(self) -> None:
        self.users -= 1


class Inner:
    """Notes whether the parameters were on the device when it read them."""

    def __init__(self, engine: Engine, *, fails: bool = False) -> None:
        self.engine, self.fails, self.seen, self.released = engine, fails, list[int](), 0

    def acquire(self, version: int) -> None:
        self.seen.append(self.engine.users)
        if self.fails:
            raise RolloutError(f"version {version} did not arrive")

    def release(self) -> None:
        self.released += 1


def test_the_trainers_own_module_stays_while_the_engine_is_awake() -> None:
    engine = Engine()
    source = OffloadedSource(engine, None)  # type: ignore[arg-type]
    source.release()
    assert engine.users == 0, "nothing was acquired yet"
    source.acquire(3)
    assert engine.users == 1
    for _ in range(2):  # an engine may be sent to sleep twice
        source.release()
        assert engine.users == 0


@pytest.mark.parametrize("fails", [False, True])
def test_another_source_reads_them_and_lets_them_go(fails: bool) -> None:
    engine = Engine()
    inner = Inner(engine, fails=fails)
    source = OffloadedSource(engine, inner)  # type: ignore[arg-type]
    if fails:
        with pytest.raises(RolloutError, match="version 3"):
            source.acquire(3)
    else:
        source.acquire(3)
        source.release()
    assert inner.seen == [1] and engine.users == 0 and inner.released == int(not fails)
