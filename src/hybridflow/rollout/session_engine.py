"""The part that all engines have in common which work in sessions of their own kind; and the copy of
received weights into the module of an engine in this process.

open() ──► EngineSession: requests join and leave at any time ──► EngineReplica
generate(requests) ──► a closed session, which has these requests only, read to its end
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import (
    EngineSession,
    GenerationOutput,
    GenerationRequest,
    RolloutStats,
    SomeWeights,
)
from hybridflow.rollout.requests import check_ids

MAX_NAMES = 5
"""Missing weights that a message names."""


class SessionEngine(ABC):
    """A `RolloutEngine` whose sessions a subclass makes; it has at most one at a time."""

    def __init__(self) -> None:
        self._stats = RolloutStats()
        self._session: EngineSession | None = None

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the newest `generate` or session, up to now."""
        return self._stats

    @property
    def asleep(self) -> bool:
        """Whether `wake_up` must come before anything is generated."""
        return False

    def open(self, *, closed: bool = False) -> EngineSession:
        """Return a session that requests may join at any time or, if it is `closed`, in one call before its
        first step. RolloutError when asleep or in use.
        """
        self._check_ready("open()")
        self._stats = RolloutStats()
        self._session = self._new_session(closed)
        return self._session

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Yield one output for each request, as they finish.

        A request that cannot be served gives reason "error" and the others go on. RolloutError for a repeated
        request id, when asleep, and while another call runs or a session is open.
        """
        self._check_ready("generate()")
        check_ids(requests)
        return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        session = self.open(closed=True)
        try:
            yield from session.add(requests)
            while not session.idle:
                yield from session.step()
        finally:
            session.close()

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests of the running `generate` or session; their partial responses come back here."""
        if self._session is None:
            return []
        return self._session.abort(request_ids)

    @abstractmethod
    def _new_session(self, closed: bool) -> EngineSession:
        """Return a session, `closed` as in `open`, that calls `_closed` when it ends."""

    def _closed(self) -> None:
        self._session = None

    def _check_ready(self, call: str) -> None:
        self._check_free(call)
        if self.asleep:
            raise RolloutError(f"{call} was called on a sleeping engine: call wake_up() first")

    def _check_free(self, call: str) -> None:
        if self._session is not None:
            raise RolloutError(
                f"{call} was called while generate() is running or a session is open: read its outputs to "
                "the end or close it first"
            )


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into a Hugging Face model, by name.

    Raises RolloutError for a name or shape that the model does not have, and for weights that are missing,
    unless the sender says by `SomeWeights` that the others are in place.
    """
    own = model.state_dict(keep_vars=True)
    lacking = {id(parameter): name for name, parameter in reversed(list(own.items()))}
    for name, weight in weights:
        if name not in own or own[name].shape != weight.shape:
            has = "it has no weight of that name"
            if name in own:
                has = f"its own is {tuple(own[name].shape)}"
            raise RolloutError(
                f"update_weights got {name!r} of shape {tuple(weight.shape)}, which does not fit the "
                f"model: {has}"
            )
        own[name].copy_(weight)
        lacking.pop(id(own[name]), None)  # with one of two tied weights the other has come too
    if not lacking or isinstance(weights, SomeWeights):
        return
    names = list(lacking.values())[::-1]
    shown = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown += f" and {len(names) - MAX_NAMES} more"
    raise RolloutError(
        f"update_weights got {len(own) - len(names)} of {len(own)} weights; missing: {shown}. The "
        "engine now holds old and new weights together: give it all of them, or wrap those that "
        "changed in SomeWeights"
    )
