"""Recorded steps: the operators of a function with their storages, which a replay runs once more.

What a CUDA graph refuses is refused: waits of the host, copies between host and device, shapes that data
decide. Memory that has been given back since the recording is told at the replay, where a GPU would read
whatever is there now.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hybridflow.distributed.facilities import Facilities
from simulated_accelerator import counts, timeline
from simulated_accelerator.memory import Block


class Tape:
    """What was recorded."""

    def __init__(self) -> None:
        self.steps: list[tuple[Callable[..., Any], Sequence[Any], dict[str, Any], Any]] = []
        self.outside: dict[int, tuple[weakref.ref[Block], str]] = {}
        """Memory that was there before the recording, and the line that used it first."""
        self._own = set[int]()

    def own(self, storage: torch.UntypedStorage) -> None:
        """Note memory that was made within the recording: it is in the graph's pool."""
        self._own.add(storage._cdata)

    def note(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        output: Any,
        used: Sequence[Block],
    ) -> None:
        """Add a step; `args` and `output` are CPU tensors over the device's memory."""
        self.steps.append((function, args, kwargs, output))
        for block in used:
            if block.storage._cdata not in self._own and id(block) not in self.outside:
                self.outside[id(block)] = (weakref.ref(block), counts.place(1))

    def check(self) -> None:
        """Raise DeviceFault where memory from outside is gone."""
        for kept, where in self.outside.values():
            block = kept()
            if block is None or block.freed:
                raise counts.fault(
                    f"a recorded step is replayed on memory that has moved since, used at {where}"
                )

    def replay(self) -> None:
        """Run all steps once more, on the same memory."""
        self.check()
        counts.launched("replay")
        with torch.no_grad():
            for function, args, kwargs, output in self.steps:
                new = function(*args, **kwargs)
                for kept, value in zip(tree_leaves(output), tree_leaves(new), strict=True):
                    if isinstance(kept, Tensor) and kept is not value:
                        kept.copy_(value)


class SimulatedRecorder:
    """Records as CUDA's does: a first run, then the recording."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Run `run` twice, the second time for the tape; return a function that fills the same tensor."""
        run()
        if timeline.tape() is not None:
            raise RuntimeError("a stream is capturing already")
        tape = Tape()
        timeline.record_on(tape)
        try:
            output = run()
        finally:
            timeline.record_on(None)

        def replay() -> Tensor:
            tape.replay()
            return output

        return replay

    def forget(self) -> None:
        """Nothing is shared between recordings."""


class SimulatedFacilities(Facilities):
    """It records steps."""

    def recorder(self, device: torch.device) -> SimulatedRecorder:
        """Return a recorder of steps."""
        return SimulatedRecorder(device)
