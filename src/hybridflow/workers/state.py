"""What every worker with an engine can do: give and take its checkpoint state."""

from __future__ import annotations

from typing import Any, TypeVar

from hybridflow.controller import Dispatch, Worker, WorkerGroup, register
from hybridflow.engines import TrainEngine


class StatefulWorker(Worker):
    """A worker that owns one training engine."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def state_dict(self) -> dict[str, Any]:
        """The engine's whole state."""
        return self.engine.state_dict()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def weights(self) -> dict[str, Any]:
        """The part of the state that another role of the same model can take over: its parameters alone."""
        return {"model": self.engine.state_dict()["model"]}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state, or some of its parts, in place."""
        self.engine.load_state_dict(state)


W = TypeVar("W", bound=StatefulWorker)


class StatefulGroup(WorkerGroup[W]):
    """The driver's view of workers with an engine."""

    def state_dict(self) -> dict[str, Any]:
        """See `StatefulWorker.state_dict`."""
        return self.call(StatefulWorker.state_dict)

    def weights(self) -> dict[str, Any]:
        """See `StatefulWorker.weights`."""
        return self.call(StatefulWorker.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `StatefulWorker.load_state_dict`."""
        self.call(StatefulWorker.load_state_dict, state)
