"""A generative reward model that the run serves to its reward functions: all replicas behind one address.

    reward function ──HTTP──► Service ──JudgeClient──► the least loaded replica ──► its engine, in a worker
                                            └── a replica that is lost: to another, while it is started again

Where other roles share its pool, or the driver's process, its replicas are those of a worker group like the
rollout's. In a pool of its own, each replica has a backend for itself (processes, devices, a watchdog), so
that the run outlives the loss of one. Every group is stepped in a thread of its own, until the run ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from hybridflow.config import PPOConfig
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError, HybridFlowError, WorkerLost
from hybridflow.models.attention.rope import longest_generated
from hybridflow.models.files.build import shape_of
from hybridflow.rewards.load import JudgeAccess
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput
from hybridflow.rollout.client import DeadlinePassed, LLMClient, Replica, ReplicaLost, in_own_loop
from hybridflow.rollout.server.app import build_app
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.run import LoopServer
from hybridflow.rollout.server.service import ServerLimits, Service
from hybridflow.trainer.models import naming_model
from hybridflow.workers import RolloutGroup

logger = logging.getLogger(__name__)

KEYS = "reward.reward_model"
HOST = "127.0.0.1"
"""Address of the server: the processes that score are on the driver's machine."""
LISTEN_SECONDS = 60.0
MOST_TRIES = 3
"""Replicas that a request is sent to, one after the other: it may be what they die of."""
LOOK_SECONDS = 0.05
"""Time between two looks for a replica that is alive."""
FIRST_PAUSE = 5.0
"""Seconds after the first start of a replica that failed; each further pause is twice as long."""


@dataclass(eq=False)
class ReplicaKeeper:
    """A thread that steps the engines of one group for the requests of a client, and starts them again when
    they are lost.
    """

    name: str
    group: RolloutGroup
    start: Callable[[], RolloutGroup] | None
    """Starts the processes of the group anew; None where they are the run's own, which ends with them."""
    restarts: int
    """How often it may still be started again."""
    longest_pause: float
    """Most seconds from a start that failed to the next one."""
    replicas: tuple[Replica, ...] = ()
    """The replicas that take requests now."""
    failure: str | None = None
    """Reason why it is not started again, or None."""

    def __post_init__(self) -> None:
        self._closing = threading.Event()
        self._lock = threading.Lock()  # while there are replicas in it, their backend is not shut down
        self._thread = threading.Thread(target=self._run, name=f"keeper of {self.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests, and end the thread at the next step of the engines."""
        self._closing.set()
        with self._lock:
            if self.replicas:
                self.group.wake()

    def join(self, seconds: float) -> bool:
        """Return whether the thread has ended, after at most some seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with self.group.opened() as client:
                    if self.start is not None:
                        for replica in client.replicas:
                            replica.name = self.name  # its group has one, which is the first of each
                    self.replicas = client.replicas
                    self.group.serve(self._closing.is_set)
            except Exception as error:  # whatever an engine or a process dies of
                with self._lock:
                    self.replicas = ()
                if not self._closing.is_set():
                    logger.error("%s of the judge was lost: %s: %s", self.name, type(error).__name__, error)
                    self._start_again(error)
            if self.failure is not None:
                return

    def _start_again(self, error: Exception) -> None:
        """Start the engines again, unless that was done too often; then `failure` says what they died of.

        After a start that failed it pauses, each time twice as long, as what is missing may come back.
        """
        pause = 0.0
        while not self._closing.is_set():
            if self.restarts == 0 or (self.start is None and isinstance(error, WorkerLost)):
                self.failure = f"{self.name} was lost: {type(error).__name__}: {error}"
                logger.error(
                    "%s of the judge is not started again (%s.rollout.max_restarts)", self.name, KEYS
                )
                return
            self.restarts -= 1
            if self.start is None:
                return  # its engines are opened again, in the same processes
            if pause:
                logger.warning("%s of the judge is started again in %g s", self.name, pause)
            if self._closing.wait(pause):
                return
            pause = min(max(FIRST_PAUSE, 2 * pause), self.longest_pause)
            try:
                self.group.backend.shutdown()
                self.group = self.start()
                if self._closing.is_set():  # nobody may be left who waits for it
                    self.group.backend.shutdown()
                    return
            except Exception as again:  # devices that are gone, a folder that is: the next try may find them
                error = again
                logger.error("%s of the judge did not start: %s: %s", self.name, type(again).__name__, again)
            else:
                logger.warning("%s of the judge was started again", self.name)
                return


class JudgeClient(LLMClient):
    """A client of all replicas that are alive; a request that loses its replica is sent to another."""

    def __init__(self, keepers: Sequence[ReplicaKeeper]) -> None:
        super().__init__([replica for keeper in keepers for replica in keeper.group.replicas])
        self._keepers = keepers

    @property
    def failure(self) -> str | None:
        """Reason why nothing can be served any more; None while a replica is alive, or may be again."""
        failures = [keeper.failure for keeper in self._keepers]
        return None if None in failures else "; ".join(map(str, failures))

    async def generate(
        self, request: GenerationRequest, *, sticky: Hashable | None = None, deadline_s: float | None = None
    ) -> GenerationOutput:
        """Do what `LLMClient.generate` does, on up to MOST_TRIES replicas within the one deadline.

        Where no replica is alive, it waits for one that is being started again.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + (math.inf if deadline_s is None else deadline_s)
        tries = 0
        while True:
            while not self._found_alive():
                if self.failure is not None:
                    raise ReplicaLost(f"no replica of the judge is alive: {self.failure}")
                if clock() >= ends:
                    raise DeadlinePassed(
                        f"request {request.request_id} found no replica of the judge alive within "
                        f"{deadline_s:g} s (deadline_s)"
                    )
                await asyncio.sleep(LOOK_SECONDS)
            left = deadline_s
            if left is not None and tries:
                left = max(0.0, ends - clock())
            tries += 1
            try:
                return await super().generate(request, sticky=sticky, deadline_s=left)
            except ReplicaLost as error:
                if tries == MOST_TRIES:
                    raise
                logger.warning("request %d goes to another replica: %s", request.request_id, error)

    async def stream(
        self, request: GenerationRequest, *, sticky: Hashable | None = None, deadline_s: float | None = None
    ) -> AsyncGenerator[PartialOutput | GenerationOutput, None]:
        """Yield the whole output: what was sent of one replica's could not be taken back."""
        yield await self.generate(request, sticky=sticky, deadline_s=deadline_s)

    def _found_alive(self) -> bool:
        self.replicas = tuple(replica for keeper in self._keepers for replica in keeper.replicas)
        return bool(self._alive())


class JudgeServer:
    """The address of a run's judge, which there is before the reward functions are loaded; requests wait for
    the engines.
    """

    def __init__(self, config: PPOConfig) -> None:
        """Read the model's tokenizer and sizes; ConfigError where they do not fit the keys."""
        learned = config.reward.reward_model
        model = learned.model
        path = str(model.tokenizer_path or model.path)
        with naming_model(f"{KEYS}.model.path", model.path):
            shape = shape_of(model)
        positions = longest_generated(shape)
        longest = learned.rollout.max_model_len or positions
        if longest is None or (positions is not None and longest > positions):
            raise ConfigError(
                f"{KEYS}.rollout.max_model_len={learned.rollout.max_model_len}: {model.path} has "
                f"{positions or 'no number of'} positions; set a number up to that"
            )
        chosen = "tokenizer_path" if model.tokenizer_path else "path"
        with naming_model(f"{KEYS}.model.{chosen}", path):
            tokenizer = load_tokenizer(path, model.trust_remote_code)
        if not tokenizer.chat_template:
            raise ConfigError(
                f"{KEYS}.model: the tokenizer {path} has no chat template, so the judge cannot be asked: set "
                f"{KEYS}.model.tokenizer_path to one that has"
            )
        self._model = ServedModel(
            str(model.path),
            tokenizer,
            shape.get_text_config().vocab_size,
            longest,
            any_name=True,
            pictures_refused="the judge of a run is asked in text alone",
        )
        self._restarts = learned.rollout.max_restarts
        self._deadline_s = config.reward.timeout
        self._startup_timeout = config.trainer.startup_timeout
        self._path = path
        self._trusts = model.trust_remote_code
        self._address: concurrent.futures.Future[str] = concurrent.futures.Future()
        self._app: concurrent.futures.Future[ASGIApp] = concurrent.futures.Future()
        self._keepers: list[ReplicaKeeper] = []

    @contextmanager
    def listening(self) -> Iterator[JudgeServer]:
        """Take connections in this context; afterwards no replica is stepped any more.

        HybridFlowError where there is no address within LISTEN_SECONDS.
        """
        with ExitStack() as stack:
            serving = stack.enter_context(in_own_loop(self._serve))
            begun: list[concurrent.futures.Future[Any]] = [self._address, serving]
            concurrent.futures.wait(begun, LISTEN_SECONDS, concurrent.futures.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            if not self._address.done():
                raise HybridFlowError(
                    f"the judge does not listen on {HOST} after {LISTEN_SECONDS:g} s: this machine is too "
                    "busy; start the run again when it is less so"
                )
            stack.callback(self._close)
            yield self

    @property
    def access(self) -> JudgeAccess:
        """What a process needs that asks the judge."""
        return JudgeAccess(self._address.result(0), self._model.name, self._path, self._trusts)

    def begin(self, groups: Mapping[str, RolloutGroup], start: Callable[[str], RolloutGroup] | None) -> None:
        """Answer requests by these groups, which are given with their names. `start` starts the processes of
        one of them again; None where they are the run's own.
        """
        for name, group in groups.items():
            again = None if start is None else partial(start, name)
            self._keepers.append(ReplicaKeeper(name, group, again, self._restarts, self._startup_timeout))
        client = JudgeClient(self._keepers)
        service = Service(client, self._model, ServerLimits(deadline_s=self._deadline_s))
        self._app.set_result(build_app(service, token=None))  # it listens on this machine alone
        where = "in pools of their own" if start is not None else "beside the other roles"
        number = sum(len(group.replicas) for group in groups.values())
        logger.info(
            "the judge %s: %d replicas %s, behind %s", self._model.name, number, where, self.access.url
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request (ASGI), as soon as the engines are there."""
        app = await asyncio.shield(asyncio.wrap_future(self._app))
        await app(scope, receive, send)

    async def _serve(self) -> None:
        server = LoopServer(self, HOST, 0)
        self._address.set_result(server.address.removeprefix("http://"))
        await asyncio.Event().wait()  # until it is cancelled

    def _close(self) -> None:
        for keeper in self._keepers:
            keeper.close()
        # one that is just being started again first comes to its end, so that no process of it is left
        seconds = self._startup_timeout
        ends = time.monotonic() + seconds
        late = [each.name for each in self._keepers if not each.join(max(0.0, ends - time.monotonic()))]
        if late:
            logger.warning(
                "%s of the judge did not stop within %g s (trainer.startup_timeout)", ", ".join(late), seconds
            )
