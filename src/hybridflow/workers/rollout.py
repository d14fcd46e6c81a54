"""The rollout worker: generation with the actor's weights, shared or sent.

same process, one rank      the engine uses the actor's own module; nothing is sent
same processes, shards      shards are gathered when the engine wakes up and freed when it sleeps
other processes             `RolloutGroup.update_from` pushes weights before a step
engine with own weights     the same call pushes weights into the engine, wherever it is (vLLM, SGLang)

Requests come and outputs go beside the ordered calls. The engine is stepped by `EngineReplica`, in a thread
that runs from `resume` to `pause`, and its weights change between two steps of it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from hybridflow.controller import Dispatch, Worker, register
from hybridflow.distributed.device import used_accelerator
from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.errors import HybridFlowError, RolloutError
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import (
    EngineSession,
    GenerationOutput,
    GenerationRequest,
    RolloutEngine,
    RolloutStats,
    SharedModule,
)
from hybridflow.rollout.engine_replica import EngineReplica, ReplicaLost, ReplicaUse
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.self_check import choose_exact_mode
from hybridflow.weight_sync.push import LocalPush, RemotePush, StagedPush, WeightShare

logger = logging.getLogger(__name__)

Kind = Literal["main", "between"]
"""Two kinds of requests: the main ones, and those that are answered in between (of a validation, while groups
are generated without an end), for which the main ones are set aside.
"""
COLLECTOR_NUMBERS = 1 << 48
"""Requests of collector k have the numbers from (k + 1) times this on, those of the driver smaller ones."""
Outbox: TypeAlias = "queue.SimpleQueue[GenerationOutput | BaseException | None]"
"""Outputs not yet collected, and the error that the engine has died of; None ends a wait for them."""
Deliver = Callable[[int, GenerationOutput], None]
"""Sends an output to the process that has requested it; the first argument is the rank that has it."""


@dataclass(frozen=True)
class FinishedOutputs:
    """Outputs that have finished since the last poll."""

    outputs: list[GenerationOutput]
    silence: float
    """Seconds for which the engine has read and sampled no token although requests waited for it."""


@dataclass(frozen=True)
class Paused:
    """The state of a rank whose engine sleeps."""

    version: int
    """Version of its weights, as the engine says."""
    stats: RolloutStats
    """Counts since it was resumed."""


class RolloutWorker(Worker):
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
        self._device = used_accelerator()
        self._dropped: int | None = None
        """Version of the weights that the engine dropped when it fell asleep; it gets them again first."""
        self._deliver: Deliver | None = None
        self._use = ReplicaUse()
        self._lock = threading.Lock()
        self._replicas: dict[Kind, EngineReplica] = {}
        self._openings: dict[Kind, int] = {}  # the newest one that was resumed
        self._outboxes: dict[tuple[Kind, int], Outbox] = {}
        self._errors: dict[Kind, BaseException] = {}  # of which engines have died, until they are raised

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def submit(self, requests: Sequence[GenerationRequest], kind: Kind = "main", opening: int = 0) -> None:
        """Add requests before the next step, all before the same one.

        `opening` numbers the times that the driver takes requests of a kind: `collect` gives their outputs to
        the same one only, so that what is left of one never answers a later request of the same number.
        """
        for answer in self._replica(kind).submit_many(requests):
            answer.add_done_callback(partial(self._answered, kind, opening))

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def abort(self, request_ids: Sequence[int], kind: Kind = "main") -> None:
        """End requests with their tokens so far; unknown ones are ignored."""
        self._replica(kind).abort(request_ids)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def num_waiting(self, kind: Kind = "main") -> int:
        """Return how many requests have no room in the engine now."""
        return self._replica(kind).crowded_out

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def forget(self, kind: Kind = "main") -> None:
        """End all requests and discard their outputs."""
        self._replica(kind).forget("it is not awaited any longer")

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def end_poll(self, kind: Kind = "main", opening: int = 0) -> None:
        """Make `collect` return at once."""
        self._outbox(kind, opening).put(None)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def seconds_by_state(self) -> dict[str, float]:
        """Return the seconds in which this rank's engine was busy, standing or empty."""
        return self._use.seconds()

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def stack(self, kind: Kind = "main") -> str:
        """Return the stack of the thread that steps this rank's engine."""
        return self._replica(kind).stack()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def deliver_by(self, deliver: Deliver) -> None:
        """Pass outputs of requests from COLLECTOR_NUMBERS on to `deliver` in place of `collect`."""
        self._deliver = deliver

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="collect")
    def collect(self, seconds: float, kind: Kind = "main", opening: int = 0) -> FinishedOutputs:
        """Return the outputs that have finished, or wait at most `seconds` for the first.

        Raises the error of an engine that has died.
        """
        outbox = self._outbox(kind, opening)
        outputs: list[GenerationOutput] = []
        wait = seconds
        while True:
            try:
                found = outbox.get(timeout=wait)
            except queue.Empty:
                break
            if isinstance(found, BaseException) and outputs:  # those that finished before come first
                outbox.put(found)
                break
            if isinstance(found, BaseException):
                raise found
            if found is not None:
                outputs.append(found)
            wait = 0.0
        replica = self._replicas.get(kind)
        return FinishedOutputs(outputs, 0.0 if replica is None else replica.silence)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def resume(self, kind: Kind = "main", opening: int = 0, *, closed: bool = False) -> None:
        """Step the engine for the requests of a kind, as `EngineReplica.resume` explains.

        All ranks of the role are resumed together: they fetch weights and send them to each other.
        """
        with self._lock:
            self._openings[kind] = opening
            self._errors.pop(kind, None)
            for place in [place for place in self._outboxes if place[0] == kind and place[1] < opening]:
                del self._outboxes[place]
        self._replica(kind).resume(closed=closed)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def pause(self, kind: Kind = "main", timeout_s: float | None = None) -> Paused:
        """Return when the engine is not stepped any more, and sleeps.

        Partial responses continue when it is resumed, under the weights of that time. Raises the error of an
        engine that has died, and RolloutError where a step takes longer than `timeout_s`.
        """
        replica = self._replicas.get(kind)
        stats = RolloutStats()
        try:
            if replica is not None:
                stats = replica.pause(timeout_s, keep_kv=False)
        except ReplicaLost:
            logger.debug("the engine was paused after it had died")
        finally:
            self.end_poll(kind, self._openings.get(kind, 0))  # the driver looks no more
        with self._lock:
            error = self._errors.pop(kind, None)
        if error is not None:
            raise error
        return Paused(self._version, stats)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def update_weights(self, shares: Sequence[WeightShare], *, version: int) -> int | None:
        """Load the weights that the actor's ranks sent, unless this rank shares the actor's; return bytes.

        Raises RolloutError where they are not what the actor's ranks hold. Where only what has changed was
        sent, the result is None instead: the weights here are not those that it changes.
        """
        if self.pushed is not None:
            try:
                self._change(version, partial(self.pushed.update, self.engine, shares, version))
            except RolloutError as error:
                if all(share.base is None for share in shares):
                    raise
                logger.warning("rollout rank %d asks for whole weights: %s", self.rank, error)
                return None
        return sum(share.nbytes for share in shares)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def renew_weights(self, *, version: int) -> None:
        """Take over the weights of the policy in this process as `version`: load them where the engine has
        its own, and else note that the shared ones have changed.

        Raises RolloutError where they did not arrive.
        """
        self._change(version, partial(self._renew, version))

    def close(self) -> None:
        """End the processes that an engine with weights of its own has started."""
        if isinstance(self.engine, PushedEngine):
            self.engine.close()

    # ---- the engine as a replica has it

    @property
    def stats(self) -> RolloutStats:
        """Counts of the engine's newest session."""
        return self.engine.stats

    def wake_up(self) -> None:
        """Wake the engine; on all ranks at once, as those without a request send their shards to others."""
        if self._dropped is not None:
            self._renew(self._dropped)
        self.engine.wake_up()

    def open(self, *, closed: bool = False) -> EngineSession:
        """Open a session of the engine."""
        return self.engine.open(closed=closed)

    def sleep(self) -> None:
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

    def _replica(self, kind: Kind) -> EngineReplica:
        """Return the replica for requests of a kind; a new one after the engine has failed."""
        with self._lock:  # requests, polls and ordered calls each come in their own thread
            replica = self._replicas.get(kind)
            if replica is None or replica.failure is not None:
                replica = EngineReplica(
                    self,
                    name=f"rollout-{self.rank}",
                    ranks=self.ranks,
                    device=self._device,
                    paused=True,
                    use=self._use,
                    ended=partial(self._failed, kind),
                )
                self._replicas[kind] = replica
            return replica

    def _outbox(self, kind: Kind, opening: int) -> Outbox:
        with self._lock:
            return self._outboxes.setdefault((kind, opening), queue.SimpleQueue())

    def _answered(self, kind: Kind, opening: int, answer: Future[GenerationOutput]) -> None:
        if answer.exception() is not None:  # `_failed` has reported it, or it is not awaited
            return
        output = answer.result()
        if self._deliver is None or output.request_id < COLLECTOR_NUMBERS:
            self._outbox(kind, opening).put(output)
            return
        try:
            self._deliver(self.rank, output)
        except Exception as error:  # the driver gets it, since nothing else would notice
            self._outbox(kind, self._openings.get(kind, 0)).put(error)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def choose_exact(self, *, longest: int, temperature: float) -> ExactMode | str:
        """Return the cheapest mode in which generation and training agree to the bit on this rank, or why
        there is none; see `choose_exact_mode`.
        """
        if not isinstance(self.engine, SharedModule):
            return "its engine does not generate with the module that trains"
        try:
            self.engine.wake_up()
            return choose_exact_mode(
                self.engine, self.engine.policy, longest=longest, temperature=temperature, ranks=self.ranks
            )
        finally:
            self.engine.sleep()

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def weight_sums(self) -> dict[str, int]:
        """Return a checksum of each of the weights that this rank generates with, by name."""
        return {
            name: int(bit_sum(weight.detach(), Box.whole(weight.shape)))
            for name, weight in self._policy.named_parameters()
        }

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def set_exact(self, mode: ExactMode | None) -> None:
        """Generate in this mode from now on; None means the fastest way."""
        self._policy.exact = mode

    @property
    def _policy(self) -> PolicyModel:
        assert isinstance(self.engine, SharedModule), "asked only of an engine that has chosen an exact mode"
        return self.engine.policy

    def _failed(self, kind: Kind, error: BaseException, left: int) -> None:
        if not isinstance(error, HybridFlowError):
            problem = RolloutError(
                f"the engine failed with {left} requests left: {type(error).__name__}: {error}"
            )
            problem.__cause__ = error
            error = problem
        with self._lock:
            self._errors[kind] = error
        self._outbox(kind, self._openings.get(kind, 0)).put(error)

    def _change(self, version: int, update: Callable[[], None]) -> None:
        with self._lock:
            running = [replica for replica in self._replicas.values() if not replica.stands]
        replica = running[0] if running else self._replica("main")
        replica.update_weights(update, preempts=self.recomputes)
        reported = self._version
        if reported != version:
            raise RolloutError(
                f"rollout rank {self.rank} was given weights of version {version} and has those of version "
                f"{reported}: the update did not reach it"
            )

    def _renew(self, version: int) -> None:
        if self.owned is not None:
            self.owned.update(self.engine, version)
        else:
            self.engine.set_version(version)
        self._dropped = None

    @property
    def _version(self) -> int:
        return self.engine.policy_version if self._dropped is None else self._dropped
