"""The rollout worker: generation with the actor's weights, shared or sent.

same process, one rank      the engine uses the actor's own module; nothing is sent
same processes, shards      shards are gathered when the engine wakes up and freed when it sleeps
other processes             `RolloutGroup.update_from` pushes weights before a step
engine with own weights     the same call pushes weights into the engine, wherever it is (vLLM, SGLang)

Requests come and outputs go beside the ordered calls; the engine itself is stepped inside of one, `serve`.
They have a channel: those of one are set aside, with what they have begun, while those of the other are
served.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.controller import Dispatch, register
from hybridflow.distributed.replica_ranks import ReplicaRanks
from hybridflow.errors import RolloutError
from hybridflow.observability.progress import progress
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutEngine, RolloutStats
from hybridflow.rollout.turns import Turns
from hybridflow.weight_sync.local_push import LocalPush, StagedPush
from hybridflow.weight_sync.remote_push import RemotePush, WeightShare
from hybridflow.workers.exact import ExactRollout

CHANNELS = 2
"""Number of channels: the first for requests that are served without an end, the second for a list of them
that is answered in between.
"""
COLLECTOR_NUMBERS = 1 << 48
"""Requests of collector k have the numbers from (k + 1) times this on, those of the driver smaller ones."""
Deliver = Callable[[int, GenerationOutput], None]
"""Sends an output to the process that has asked for it; the first argument is the rank that has it."""
Finished = Callable[[GenerationOutput], None]
"""Called with each output as soon as it is there."""


@dataclass(frozen=True)
class Served:
    """The state of a replica after a turn."""

    finished: bool
    """Whether its session has ended, so that the engine sleeps."""
    version: int
    """Version of its weights, as the engine says."""
    stats: RolloutStats
    """Counts of the session so far."""
    has_requests: bool
    """Whether its engine has requests without an answer."""


@dataclass(frozen=True)
class Collected:
    """Outputs that have finished since they were last asked for."""

    outputs: list[GenerationOutput]
    turn_is_over: bool
    """Whether they are the last ones of a turn."""


class RolloutWorker(ExactRollout):
    """A generation engine with the source of its weights.

    `pushed` is set where the weights are the engine's own and come from the actor's ranks, `owned` where they
    come from the policy in this process; neither where the engine shares the actor's module. `ranks` generate
    together; the first of them is sent the requests. With `recomputes`, keys and values of requests that run
    while the weights change are computed again; without, they stay as the old weights made them.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        pushed: RemotePush | StagedPush | None = None,
        owned: LocalPush | None = None,
        ranks: ReplicaRanks | None = None,
        recomputes: bool = True,
    ) -> None:
        self.engine = engine
        self.pushed = pushed
        self.owned = owned
        self.ranks = ranks or ReplicaRanks()
        self.recomputes = recomputes
        self._turns = tuple(Turns(self.ranks) for _ in range(CHANNELS))
        self._session = 0
        self._dropped: int | None = None
        """Version of the weights that the engine dropped when it fell asleep; it gets them again first."""
        self._deliver: Deliver | None = None
        # outputs with the numbers of their sessions; None ends a turn
        self._outbox: queue.SimpleQueue[tuple[int, GenerationOutput | None]] = queue.SimpleQueue()

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def submit(self, requests: Sequence[GenerationRequest], channel: int = 0) -> None:
        """Have requests join before the next step, all before the same one."""
        self._turns[channel].inbox.submit(requests)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def abort(self, request_ids: Sequence[int], channel: int = 0) -> None:
        """Have requests end with what they have; unknown ones are passed over."""
        self._turns[channel].inbox.abort(request_ids)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def park(self, session: int, channel: int = 0) -> None:
        """Have the session of this number end before its next step; its requests go on in the next one."""
        self._turns[channel].inbox.park(session)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def rest(self, session: int, channel: int = 0) -> None:
        """Have the session of this number stand before its next step, so that its weights may change: it is
        parked where keys and values are to be computed again, and else only its turn ends.
        """
        if self.recomputes:
            self._turns[channel].inbox.park(session)
        else:
            self._turns[channel].inbox.rest(session)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def num_waiting(self, channel: int = 0) -> int:
        """Return how many requests have no room in the engine now."""
        return self._turns[channel].num_waiting

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def forget(self, channel: int = 0) -> None:
        """Forget the requests that wait for a session."""
        self._turns[channel].inbox.forget()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def deliver_by(self, deliver: Deliver) -> None:
        """Give outputs of requests from COLLECTOR_NUMBERS on to `deliver`, and not to `collect`."""
        self._deliver = deliver

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="collect")
    def collect(self, session: int, seconds: float) -> Collected:
        """Return the outputs of a session that have finished, or wait at most `seconds` for the first."""
        outputs: list[GenerationOutput] = []
        wait = seconds
        while True:
            try:
                number, output = self._outbox.get(timeout=wait)
            except queue.Empty:
                return Collected(outputs, turn_is_over=False)
            if number != session:  # of one that was broken off
                continue
            if output is None:
                return Collected(outputs, turn_is_over=True)
            outputs.append(output)
            wait = 0.0

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def serve(
        self,
        session: int,
        channel: int = 0,
        *,
        closed: bool,
        seconds: float,
        awaited: tuple[int, int | None] = (0, None),
        finished: Finished | None = None,
    ) -> Served:
        """Step the engine for a turn of about `seconds`, as `Turns.turn` explains.

        All ranks of the role serve together. In the first turn of a session (counted from 1) they fetch
        weights and send them to each other. When the session ends, the KV cache and gathered weights are
        freed. Outputs go to `finished` or, without it, to `collect`. `awaited`, for the display: how many
        there have been, and how many there will be (None: nobody knows).
        """
        leads = self.ranks.rank == 0  # the outputs of the others are the same
        turns = self._turns[channel]
        try:
            if session != self._session:
                self._begin(session)
            elif turns.finished:
                return self._served(turns)
            turn = turns.turn(self.engine, session, closed=closed, seconds=seconds)
            for output in progress.results(turn, awaited[1], done=awaited[0]):
                if leads and self._deliver is not None and output.request_id >= COLLECTOR_NUMBERS:
                    self._deliver(self.rank, output)
                elif leads and finished is None:
                    self._outbox.put((session, output))
                elif leads and finished is not None:
                    finished(output)
        finally:
            if turns.finished:
                self._sleep()
            if leads and finished is None:
                self._outbox.put((session, None))
        return self._served(turns)

    def _begin(self, session: int) -> None:
        """Wake the engine, on all ranks: those without a request send their shards to the others."""
        for turns in self._turns:
            if not turns.finished:  # the one before was broken off, and others may have slept since
                turns.end()
                self._sleep()
        self._session = session
        if self._dropped is not None:
            self.renew_weights(version=self._dropped)
        self.engine.wake_up()

    def _sleep(self) -> None:
        """Free the engine's memory. Weights that are in this process anyway are dropped: the engine would
        copy them to the CPU, and most often new ones are pushed before it generates again.
        """
        if self.owned is None or self.owned.adapters:
            self.engine.sleep()
            return
        version = self.engine.policy_version
        self.engine.sleep(level=2)
        if self.engine.policy_version != version:
            self._dropped = version

    def _served(self, turns: Turns) -> Served:
        version = self.engine.policy_version if self._dropped is None else self._dropped
        return Served(turns.finished, version, self.engine.stats, turns.has_requests)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, shares: Sequence[WeightShare], *, version: int) -> None:
        """Load the weights that the actor's ranks sent, unless this rank shares the actor's.

        Raises RolloutError where they are not what the actor's ranks hold.
        """
        if self.pushed is not None:
            self.pushed.update(self.engine, shares, version)
            self._confirm(version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def renew_weights(self, *, version: int) -> None:
        """Take over the weights of the policy in this process as `version`: load them where the engine has
        its own, and else note that the shared ones have changed.

        Raises RolloutError where they did not arrive.
        """
        if self.owned is not None:
            self.owned.update(self.engine, version)
        else:
            self.engine.set_version(version)
        self._dropped = None
        self._confirm(version)

    def _confirm(self, version: int) -> None:
        reported = self.engine.policy_version
        if reported != version:
            raise RolloutError(
                f"rollout rank {self.rank} was given weights of version {version} and has those of version "
                f"{reported}: the update did not reach it"
            )
