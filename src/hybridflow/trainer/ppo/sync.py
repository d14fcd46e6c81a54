"""The synchronous schedule: each batch is generated when it is asked for, with the newest weights.

loader ──prompts──► Trajectories ──scored rows──► TrainBatch
                         ▲
   actor ──weights──► rollout
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.errors import CheckpointError
from hybridflow.observability.timing import Timer
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.trainer.ppo.trajectories import Trajectories
from hybridflow.trainer.source import LoaderSource, TrainBatch


class SyncSource(LoaderSource[PromptRow]):
    """Generates and scores a batch between two updates, in the trainer's thread.

    A group has an index, from 0 in the order in which groups are admitted: read from the loader to be
    generated. When a batch is made, every admitted group is trained, or filtered, or left out for good; so
    the number of admitted groups and the place of the loader are all that a resumed run needs.
    """

    kind = "sync"
    """How batches are made ahead of training; a run goes on from checkpoints of its own kind only."""

    def __init__(
        self, loader: StatefulLoader[PromptRow], trajectories: Trajectories, roles: Roles, timer: Timer
    ) -> None:
        """Read prompts from `loader` and make rows of them by `trajectories`, which measures with `timer`."""
        super().__init__(loader)
        self.trajectories = trajectories
        self.roles = roles
        self.timer = timer
        self.num_admitted = 0
        self.version = 0
        """The version that was published last."""

    def admitted(self) -> Iterator[tuple[int, list[PromptRow]]]:
        """Give generation batches: the index of the first group, and the prompts."""
        for prompts in self.batches():
            first = self.num_admitted
            self.num_admitted += len(prompts)
            yield first, prompts

    def next(self, step: int) -> TrainBatch:
        """Generate and score the batch of step number `step` with the weights that were published last."""
        return self.make_batch()

    def make_batch(self, *, refill: bool = True) -> TrainBatch:
        """Generate and score the next batch; with `refill` dynamic sampling replaces the groups it drops."""
        epoch = self.loader.epoch  # read first: with an epoch's last batch the loader moves on
        self.timer.reset()
        rows, metrics = self.trajectories.for_training(self.admitted(), refill=refill)
        return TrainBatch(rows, epoch, metrics, self.timer.as_metrics())

    def note_replayed(self, step: int, draws: Mapping[str, int]) -> None:
        """Note before step number `step` trains them how many trajectories of earlier groups it has drawn
        again, by `uid`. A source without a ledger has nowhere to note it.
        """

    def publish(self, version: int) -> None:
        """Push the actor's weights into every replica that has its own."""
        self.roles.rollout.update_from(self.roles.actor, version)
        self.roles.actor.version = version
        self.version = version
        super().publish(version)

    def place(self) -> dict[str, Any]:
        """Return the place of the loader, the number of admitted groups and the version, as plain data."""
        return {
            **super().place(),
            "kind": self.kind,
            "admitted": self.num_admitted,
            "version": self.version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. CheckpointError where a run of another kind has saved it."""
        if state["kind"] != self.kind:
            raise CheckpointError(
                f"the checkpoint was saved by a run whose batches are of kind {state['kind']!r}, and this "
                f"run's are {self.kind!r}: groups that are ahead of training could be lost or trained "
                "twice. Set trainer.schedule to that of the checkpoint's run"
            )
        super().load_state_dict(state)
        self.version = int(state["version"])

    def go_to(self, place: dict[str, Any]) -> None:
        """Read the next row, of the next group, at a place that `place` has given."""
        super().go_to(place)
        self.num_admitted = int(place["admitted"])
