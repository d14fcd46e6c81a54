"""The continuous schedules (`fully_async`, `colocated_async`): groups are generated without a pause.

    loader ──admitted while `Schedule` allows──► Group ──rolled out, scored──► ready ──chosen──► training step
                    ▲                                                                             │
                    └─────── room for more ◄── weights published between two steps of decoding ◄──┘

An event loop in its own thread rolls out groups. Where generation has its own processes, another thread
steps the engines all the time. Where it shares the actor's, the engines are stepped while the trainer waits
for a batch, and rewards and environments go on while it trains. What a run has done with each group is in its
ledger; this file keeps the rows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from hybridflow.data.prompts import PromptRow
from hybridflow.episodes.filters import varied_groups
from hybridflow.errors import CheckpointError, DataError
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.row_state import rows_of_state, state_of_rows
from hybridflow.rollout.client import LLMClient, in_own_loop
from hybridflow.trainer.ppo.columns import whole
from hybridflow.trainer.schedules.ahead import CLOSE_SECONDS, AheadSource
from hybridflow.trainer.schedules.ledger import Ledger
from hybridflow.trainer.schedules.ledger_state import (
    Admitted,
    Failed,
    Filtered,
    Finished,
    Published,
    Restarted,
    Scored,
    Taken,
)
from hybridflow.trainer.schedules.schedule import Schedule
from hybridflow.trainer.schedules.sync import MAX_BARREN_BATCHES, SourceParts
from hybridflow.trainer.source import TrainBatch

logger = logging.getLogger(__name__)

FIRST_NUMBER = 1 << 40
"""The first number of a request, above those of validations."""


@dataclass
class Group:
    """A group that was admitted and is not trained."""

    index: int
    prompt: PromptRow
    epoch: int
    """Passes over the data that were complete when its prompt was read."""
    rows: DataProto | None = None
    """Its scored rows; None while it is generated."""
    metrics: Metrics = field(default_factory=Metrics)


class ContinuousSource(AheadSource):
    """Admits groups while the schedule allows, and gives each step the groups that it chooses."""

    kind = "continuous"

    def __init__(
        self,
        parts: SourceParts,
        *,
        schedule: Schedule,
        ledger: Ledger,
        partial: bool,
        max_concurrent: int | None,
    ) -> None:
        """With `partial` weights change while responses are being generated, else between them.
        `max_concurrent` groups are generated at once; None: all that are admitted.
        """
        super().__init__(parts, ledger)
        self.schedule = schedule
        self.partial = partial
        self.run_group = (parts.collectors or parts.pipeline).run_group
        self.max_concurrent = max_concurrent
        self.journal = parts.pipeline.agents.journal
        self.reading = self._changed
        self._groups: dict[int, Group] = {}  # not trained, by index
        self._prompts: deque[tuple[int, PromptRow]] = deque()  # (epoch, prompt), read and not admitted
        self._waiting: deque[Group] = deque()  # admitted and not begun
        self._num_playing = 0
        self._num_left_out = 0  # groups in a row that have failed or were filtered
        self._lost = Metrics()  # of groups that were left out since the last batch
        self._told = Metrics()  # those of them that the running step logs
        self._admits = False
        self._numbers = itertools.count(FIRST_NUMBER)
        self._news = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stack = ExitStack()
        self._server: threading.Thread | None = None

    def next(self, step: int) -> TrainBatch:
        """Return the batch of step number `step`, sorted by index; raises the error of making rows."""
        number = step - 1
        self.timer.reset()
        with self.timer("gen"):
            if self.disaggregated:
                self._wait("waiting for rollouts", lambda: self._fill(number))
            else:
                with self._idle.waiting():
                    self.roles.rollout.serve(lambda: self._is_filled(number))
        with self._changed:
            if self._error is not None and not self._fill(number):
                raise self._error
            groups = [self._groups[index] for index in sorted(self.ledger.state.batches[number])]
        metrics = Metrics.merge(group.metrics for group in groups)
        rows = self.whole_batch([group.rows for group in groups if group.rows], metrics)
        with self._changed:
            metrics.update(self._lost)
            self._told = self._lost
            self._lost = Metrics()
        return TrainBatch(rows, min(group.epoch for group in groups), metrics, self.timer.as_metrics())

    def publish(self, version: int) -> None:
        """Give all engines the actor's weights, between two steps of decoding, and admit further groups."""
        if self._error is not None:
            raise self._error
        if not self.partial:
            self._drain()
        self.roles.rollout.update_from(self.roles.actor, version)
        self.roles.actor.version = version
        self.version = version
        with self._changed:
            state = self.ledger.state
            if state.version < version:
                for index in state.batches.get(version - 1, []):
                    del self._groups[index]
                self.ledger.append(Published(version))
                self._told = Metrics()
            self._admits = True
        if self._loop is None:
            self._start()
        self._tell()

    def place(self) -> dict[str, Any]:
        """Return where the next row is read, and the rows that were read and not admitted, as plain data."""
        read = [(epoch, prompt.to_state()) for epoch, prompt in self._prompts]
        return {**super().place(), "read": read}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data, the ledger's position, and all groups that are not trained: with
        their rows where they have them, else with their prompts.
        """
        with self._changed:
            groups = [_to_state(group) for group in self._groups.values()]
            own: dict[str, Any] = {"groups": groups, "ledger": self.ledger.kept(self.ledger.sync())}
            own["lost"] = Metrics.merge([self._told, self._lost]).state_dict()
            return {**self.place(), **own, "groups_per_step": self.groups_per_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from `state`. Groups that were being generated are restarted, or go on by their journal,
        which has tokens of the version under which they were admitted: they keep it.

        CheckpointError where this run's steps are of another size, or its bound on staleness is too low for
        the groups that wait.
        """
        super().load_state_dict(state)
        self._prompts = deque((epoch, PromptRow.from_state(prompt)) for epoch, prompt in state["read"])
        for each in state["groups"]:
            group = _from_state(each)
            self._groups[group.index] = group
            if group.rows is None:
                if self._oldest_version(group.index) is None:
                    self.ledger.append(Restarted(group.index, version=self.version))
                self._waiting.append(group)
        self._lost = Metrics.from_state(state["lost"])
        follows = self.ledger.state
        if not self.schedule.holds(self.version, len(follows.batches.get(self.version, [])), follows.active):
            raise CheckpointError(
                f"{len(follows.active)} groups of the checkpoint wait for training, under weights from "
                f"version {min(follows.active.values())} on: too many for "
                f"trainer.async.max_staleness={self.schedule.max_staleness} after step {self.version}. Set "
                "it to that of the checkpoint's run"
            )

    def close(self) -> None:
        """End generation, and the processes that read ahead."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._server is not None:
            self.roles.rollout.wake()
            self._server.join(CLOSE_SECONDS)
            if self._server.is_alive():
                logger.warning("the engines have not been left %g s after they were to be", CLOSE_SECONDS)
        self._stack.close()
        super().close()

    # ---- in the trainer's thread

    def _start(self) -> None:
        """Begin to roll out groups, and to step the engines where they have their own processes."""
        client = self._stack.enter_context(self.roles.rollout.opened())
        self._stack.enter_context(in_own_loop(lambda: self._play_all(client)))
        if self.disaggregated:
            self._server = threading.Thread(target=self._serve, name="engines", daemon=True)
            self._server.start()

    def _drain(self) -> None:
        """Start no group until all that were started are complete."""
        with self._changed:
            self._admits = False
        if self._server is not None:
            self._wait("waiting for responses to be whole", lambda: not self._num_playing)
        elif self._num_playing:
            with self._idle.waiting():
                self.roles.rollout.serve(lambda: not self._num_playing or self._error is not None)

    def _is_filled(self, step: int) -> bool:
        """Return whether a step has its batch, or never will."""
        with self._changed:
            return self._fill(step) or self._error is not None

    def _fill(self, step: int) -> bool:
        """Take ready groups for a step as far as the schedule allows; return whether it is full."""
        state = self.ledger.state
        while True:
            taken = len(state.batches.get(step, []))
            if taken == self.groups_per_step:
                return True
            index = self.schedule.choose(step, taken, state.active, state.ready)
            if index is None:
                return False
            self.ledger.append(Taken(index, step=step, tokens=_num_tokens(self._groups[index].rows)))

    # ---- in the thread that steps the engines

    def _serve(self) -> None:
        try:
            self.roles.rollout.serve(lambda: self._closing)
        except BaseException as error:  # raised in the trainer's thread
            self._fail(error)

    # ---- in the event loop

    async def _play_all(self, client: LLMClient) -> None:
        """Start groups whenever there is room for them, until cancelled."""
        news = asyncio.Event()
        self._news = news
        self._loop = asyncio.get_running_loop()
        # each group that is scored takes a thread, which waits: asyncio's own few would be a limit on groups
        most = self.schedule.groups_per_step + self.schedule.groups_ahead
        self._loop.set_default_executor(ThreadPoolExecutor(most, "scores"))
        playing: set[asyncio.Task[None]] = set()
        while True:
            news.clear()
            try:
                begun = self._begin_groups()
            except Exception as error:
                self._fail(error)
                return
            for group in begun:
                task = asyncio.create_task(self._play(group, client))
                playing.add(task)
                task.add_done_callback(playing.discard)
            await news.wait()

    def _begin_groups(self) -> list[Group]:
        """Return the groups that may start now: those of a checkpoint first, then new ones."""
        begun = []
        with self._changed:
            state = self.ledger.state
            while self._admits and self._error is None and not self._closing:
                if self.max_concurrent is not None and self._num_playing >= self.max_concurrent:
                    break
                if self._waiting:
                    group = self._waiting.popleft()
                elif self.schedule.may_admit(state.num_taken, len(state.active), state.version):
                    group = self._admitted_group()
                else:
                    break
                self._num_playing += 1
                begun.append(group)
        return begun

    def _admitted_group(self) -> Group:
        if not self._prompts:
            epoch = self.loader.epoch
            self._prompts.extend((epoch, prompt) for prompt in next(self.batches()))
        epoch, prompt = self._prompts.popleft()
        state = self.ledger.state
        group = Group(state.num_admitted, prompt, epoch)
        self._groups[group.index] = group
        version = state.version
        oldest = self._oldest_version(group.index)
        if oldest is not None and self.schedule.may_admit(state.num_taken, len(state.active), oldest):
            version = min(oldest, version)  # its tokens are as stale as that
        self.ledger.append(Admitted(group.index, version=version))
        self.num_admitted = state.num_admitted
        return group

    def _oldest_version(self, index: int) -> int | None:
        """Return the oldest version that a group has tokens of which is about to go on, or None."""
        return None if self.journal is None else self.journal.oldest_version(index)

    async def _play(self, group: Group, client: LLMClient) -> None:
        """Make the rows of a group; an error of the whole group ends the run."""
        try:
            made = await self.run_group(group.index, group.prompt, client, self._numbers)
            self.failures.add_all(made.failed)
            if client.failure is not None:  # whatever steps the engines raises it: no fault of the group's
                return
            with self._changed:
                self._num_playing -= 1
                self._keep(group, made.rows, made.metrics)
        except Exception as error:
            if client.failure is None:
                self._fail(error)
        self._tell()

    def _keep(self, group: Group, rows: DataProto, metrics: Metrics) -> None:
        """Record a finished group; an empty one, or one with nothing to learn, makes room for another."""
        index = group.index
        if not len(rows):
            self.ledger.append(Failed(index, cause=_cause(metrics)))
            self._leave_out(group, metrics)
            return
        if metrics.to_floats().get("agent/journal/continued"):
            # a journal may have tokens of steps that a resumed run makes anew, of which there are no weights
            rows.batch["policy_version"].clamp_(max=self.version)
        metrics.add_sum("rollout/generated_tokens", float(_num_tokens(rows)))
        self.ledger.append(Finished(index, tokens=_num_tokens(rows)), Scored(index))
        filters = self.config.algorithm.filter_groups
        if filters.enable and not len(varied_groups(rows, filters)):
            self.ledger.append(Filtered(index))
            self._leave_out(group, metrics)
            return
        group.rows = rows
        group.metrics = metrics
        self._num_left_out = 0

    def _leave_out(self, group: Group, metrics: Metrics) -> None:
        del self._groups[group.index]
        self._lost.update(metrics)
        self._num_left_out += 1
        if self._num_left_out >= MAX_BARREN_BATCHES * self.groups_per_step:
            raise DataError(
                f"the last {self._num_left_out} groups were left out, because all of their trajectories "
                "failed or dynamic sampling found nothing to learn from: use prompts that the model gets "
                f"right now and then, or see what failed ({self.failures})"
            )

    # ---- in any thread

    def _tell(self) -> None:
        """Notify all waits to check their conditions."""
        with self._changed:
            self._changed.notify_all()
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended after an error, which is raised elsewhere
                self._loop.call_soon_threadsafe(self._news.set)
        if self._server is None:
            self.roles.rollout.wake()

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        if self._server is None:
            self.roles.rollout.wake()


def _num_tokens(rows: DataProto | None) -> int:
    return 0 if rows is None else int(rows.batch["response_mask"].sum())


def _cause(metrics: Metrics) -> str:
    """Return the most frequent cause by which trajectories of a group have failed."""
    prefix = "training/num_failed/"
    counts = {name: count for name, count in metrics.to_floats().items() if name.startswith(prefix)}
    return max(counts, key=counts.__getitem__, default=f"{prefix}unknown").removeprefix(prefix)


def _to_state(group: Group) -> dict[str, Any]:
    state = {"index": group.index, "prompt": group.prompt.to_state(), "epoch": group.epoch, "rows": None}
    if group.rows is not None:
        state["rows"] = state_of_rows(whole(group.rows))
        state["metrics"] = group.metrics.state_dict()
    return state


def _from_state(state: Mapping[str, Any]) -> Group:
    group = Group(state["index"], PromptRow.from_state(state["prompt"]), state["epoch"])
    if state["rows"] is not None:
        group.rows = rows_of_state(state["rows"])
        group.metrics = Metrics.from_state(state["metrics"])
    return group
