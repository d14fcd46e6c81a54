"""Collectors: processes that roll out groups beside the driver, and keep the tokens (`num_collectors`).

    driver      run_group(index, prompt) ────► Collector of group index % N, which has a RolloutPipeline
    collector   requests ──► rollout workers ──outputs──► trajectory ──► reward ──► rows
    driver      ◄── light columns, by `collect`          └── the others stay in the object store ──► workers

A collector sends its requests to the engines itself. The driver sends none: it keeps the engines stepped
until it has all groups. `columns.py` says what of the rows does not come to the driver.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import queue
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hybridflow.agent.journal import Journal
from hybridflow.config import PPOConfig
from hybridflow.controller import Dispatch, RankInfo, Worker, WorkerFactory, WorkerGroup, register
from hybridflow.controller.backend import Peers
from hybridflow.controller.resource_pool import COLLECTOR
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.episodes.agents import Agents
from hybridflow.episodes.pipeline import GroupRows, RolloutPipeline
from hybridflow.episodes.rollout_traces import rollout_traces
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.remote import RemoteColumn, widths_of
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rollout.base import GenerationOutput, RolloutStats
from hybridflow.rollout.client import LLMClient, ReplicaLost
from hybridflow.trainer.ppo.columns import MASKS, STAYS, divided, needs_whole_rows
from hybridflow.workers import RolloutGroup, RolloutWorker
from hybridflow.workers.rollout import COLLECTOR_NUMBERS
from hybridflow.workers.rollout_replica import WorkerReplica

POLL_SECONDS = 5.0
"""Longest wait for the next group of a collector before it is asked again."""
LOOK_SECONDS = 0.5
"""Longest wait before a running group checks whether the engines have failed."""


@dataclass(frozen=True)
class GroupResult:
    """The result of a group."""

    index: int
    made: GroupRows
    """Its rows have the columns that the driver computes with; all where the group has no rows."""


@dataclass(frozen=True)
class GroupResults:
    """The results of groups since they were last collected."""

    groups: list[GroupResult]
    ticket: int
    """By this number the collector gives the other columns of their rows, in their order."""


@dataclass(frozen=True)
class Delivery:
    """Sends outputs of a rollout worker to the collectors that have asked for them."""

    collectors: Peers

    def __call__(self, rank: int, output: GenerationOutput) -> None:
        """Send an output that the rollout's `rank` has."""
        collector = output.request_id // COLLECTOR_NUMBERS - 1
        self.collectors.call_one(collector, Collector.deliver, rank, output)


class Collector(Worker):
    """One process: an event loop in which groups are rolled out, with its own agents and rewards."""

    def __init__(
        self,
        config: PPOConfig,
        agent_names: Collection[str],
        needs: Collection[str],
        rank: int,
        world_size: int,
    ) -> None:
        config = shared_out(config, world_size)
        tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
        self._agents = Agents(config, tokenizer, agent_names, Journal.of_run(config))
        rewards = build_reward_manager(config.reward, config.trainer.seed)
        self._traces = rollout_traces(config, tokenizer, world_size)
        self._pipeline = RolloutPipeline(rewards, tokenizer, config, self._agents, needs, self._traces)
        self._numbers = itertools.count((rank + 1) * COLLECTOR_NUMBERS)
        self._replicas: dict[int, WorkerReplica] = {}
        self._client: LLMClient | None = None
        self._done: queue.SimpleQueue[tuple[GroupResult, DataProto] | Exception] = queue.SimpleQueue()
        self._playing: set[concurrent.futures.Future[None]] = set()
        self._kept: dict[int, DataProto] = {}
        self._tickets = itertools.count()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="groups", daemon=True).start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def connect(self, rollout: Peers, leaders: Sequence[int]) -> None:
        """Send requests to the ranks `leaders` of the rollout from now on."""
        for rank in leaders:
            replica = WorkerReplica(rollout, rank)
            replica.open()
            self._replicas[rank] = replica
        self._client = LLMClient(tuple(self._replicas.values()))

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def play(self, index: int, prompt: PromptRow, timed: bool) -> None:
        """Begin to roll out a group; `collect` returns its result."""
        playing = asyncio.run_coroutine_threadsafe(self._play(index, prompt, timed), self._loop)
        self._playing.add(playing)  # the loop itself holds its tasks by weak references only
        playing.add_done_callback(self._playing.discard)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="requests")
    def deliver(self, rank: int, output: GenerationOutput) -> None:
        """Take the output of a request to the rollout's `rank`."""
        self._replicas[rank].answer(output)

    @register(dispatch_mode=Dispatch.RANK_ZERO, lane="collect")
    def collect(self, seconds: float) -> GroupResults:
        """Return the finished groups, or wait at most `seconds` for the first.

        Raises the error that has made groups impossible.
        """
        found: list[tuple[GroupResult, DataProto]] = []
        wait = seconds
        while True:
            try:
                done = self._done.get(timeout=wait)
            except queue.Empty:
                break
            if isinstance(done, Exception):
                raise done
            found.append(done)
            wait = 0.0
        ticket = next(self._tickets)
        kept = [rows for _, rows in found if len(rows)]
        if kept:
            self._kept[ticket] = join_rows(kept, self._pipeline.pad_token_id)
        return GroupResults([played for played, _ in found], ticket)

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def columns(self, ticket: int) -> DataProto:
        """Return the columns of collected rows that did not go to the driver; this process forgets them."""
        return self._kept.pop(ticket)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def end_traces(self) -> None:
        """Send the traces that wait."""
        if self._traces is not None:
            self._traces.close()

    async def _play(self, index: int, prompt: PromptRow, timed: bool) -> None:
        assert self._client is not None, "it gets its client before it runs a group"
        try:
            made = await self._pipeline.run_group(index, prompt, self._client, self._numbers, timed=timed)
            if self._agents.are_used:
                made.metrics.update(self._agents.processes())
            light, kept = divided(made.rows)
            self._done.put((GroupResult(index, replace(made, rows=light)), kept))
        except BaseException as error:  # raised in the driver, whatever it is
            self._done.put(_cause(error))


class Collectors:
    """The driver's view of all collectors, which make rows in place of its own pipeline."""

    def __init__(
        self, group: WorkerGroup[Collector], rollout: RolloutGroup, config: PPOConfig, pad_token_id: int
    ) -> None:
        self.gives_whole_rows = needs_whole_rows(config)
        """Whether the run reads all columns in the driver at each step."""
        self._group = group
        self._pad_token_id = pad_token_id
        self._rollout = rollout
        self._waiting: list[dict[int, asyncio.Future[GroupResult]]] = [{} for _ in range(group.world_size)]
        self._polls: set[asyncio.Task[None]] = set()
        leaders = [replica.rank for replica in rollout.replicas]
        group.call(Collector.connect, group.backend.peers(rollout.role), leaders)
        rollout.call(RolloutWorker.deliver_by, Delivery(group.backend.peers(group.role)))

    def end_traces(self) -> None:
        """Send all traces; no group runs afterwards."""
        self._group.call_list(Collector.end_traces)

    def run_groups(self, first_group: int, prompts: Sequence[PromptRow]) -> tuple[GroupRows, RolloutStats]:
        """Run the groups of one generation batch, numbered from `first_group`."""

        async def run_all(client: LLMClient) -> list[GroupRows]:
            numbered = enumerate(prompts, first_group)
            return await asyncio.gather(
                *(self.run_group(index, prompt, client, timed=False) for index, prompt in numbered)
            )

        groups, stats = self._rollout.run(run_all)
        rows = join_rows([group.rows for group in groups], self._pad_token_id)
        metrics = Metrics.merge(group.metrics for group in groups)
        return GroupRows(rows, metrics, [outcome for group in groups for outcome in group.failed]), stats

    async def run_group(
        self,
        index: int,
        prompt: PromptRow,
        client: LLMClient,
        numbers: Iterator[int] | None = None,
        *,
        timed: bool = True,
    ) -> GroupRows:
        """Run a group on the collector of its index; its rows are light. A collector has its own
        `numbers` of requests.

        Raises what the collector raised, WorkerLost where it is lost, and ReplicaLost where the engines of
        `client` have failed.
        """
        rank = index % self._group.world_size
        waiting = self._waiting[rank]
        found: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        waiting[index] = found
        self._group.call_one(rank, Collector.play, index, prompt, timed)
        if len(waiting) == 1:
            poll = asyncio.create_task(self._poll(rank))
            self._polls.add(poll)
            poll.add_done_callback(self._polls.discard)
        try:
            while not found.done():
                await asyncio.wait([found], timeout=LOOK_SECONDS)
                if client.failure is not None and not found.done():
                    raise ReplicaLost(client.failure)
        finally:
            waiting.pop(index, None)
        return found.result().made

    async def _poll(self, rank: int) -> None:
        """Take the groups of a collector as long as any is awaited."""
        waiting = self._waiting[rank]
        seconds = min(POLL_SECONDS, self._group.backend.call_timeout / 4)
        try:
            while waiting:
                collected = await self._group.call_one(rank, Collector.collect, seconds)
                self._hand_out(rank, collected)
        except Exception as error:
            for found in waiting.values():
                if not found.done():
                    found.set_exception(error)
            waiting.clear()  # a group that starts from now on asks again

    def _hand_out(self, rank: int, collected: GroupResults) -> None:
        """Set where the other columns of the rows are, and resolve the waiting futures."""
        shard = None
        number = 0
        for played in collected.groups:
            rows = played.made.rows
            if len(rows):
                if shard is None:
                    future = self._group.call_one(rank, Collector.columns, collected.ticket)
                    shard = future.parts[rank]
                fit = (*widths_of(rows), self._pad_token_id)
                numbers = range(number, number + len(rows))
                number += len(rows)
                remote = {name: RemoteColumn.in_shard(shard, name, numbers, fit) for name in (*STAYS, *MASKS)}
                played = replace(played, made=replace(played.made, rows=rows | DataProto(remote=remote)))
            found = self._waiting[rank].pop(played.index, None)
            if found is not None and not found.done():
                found.set_result(played)


def collector_factories(
    config: PPOConfig, agent_names: Collection[str], needs: Collection[str]
) -> Mapping[str, WorkerFactory]:
    """Return the factory of the role, by its name; none where the run has no collectors."""
    if not config.trainer.num_collectors:
        return {}
    folder = Path(config.trainer.default_local_dir).expanduser().resolve()  # they may run in another one
    config = replace(config, trainer=replace(config.trainer, default_local_dir=str(folder)))
    return {COLLECTOR: partial(_build, config, tuple(agent_names), tuple(needs))}


def _build(
    config: PPOConfig, agent_names: Collection[str], needs: Collection[str], info: RankInfo
) -> Collector:
    return Collector(config, agent_names, needs, info.rank, info.world_size)


def shared_out(config: PPOConfig, parts: int) -> PPOConfig:
    """Return the configuration of one of `parts` collectors, with processes and limits divided by `parts`.

    Each has at least one process of rewards, and of tools, where the run has any.
    """
    reward = config.reward
    agent = config.actor_rollout_ref.rollout.agent

    def part(count: int | None) -> int | None:
        return None if count is None else -(-count // parts)

    reward = replace(
        reward,
        num_workers=-(-reward.num_workers // parts),
        max_concurrent=part(reward.max_concurrent),
        max_rpm=None if reward.max_rpm is None else reward.max_rpm / parts,
        max_tpm=None if reward.max_tpm is None else reward.max_tpm / parts,
        sandbox_fusion=replace(
            reward.sandbox_fusion, max_concurrent=-(-reward.sandbox_fusion.max_concurrent // parts)
        ),
    )
    agent = replace(
        agent,
        num_workers=-(-agent.num_workers // parts),
        max_concurrent=-(-agent.max_concurrent // parts),
    )
    rollout = replace(config.actor_rollout_ref.rollout, agent=agent)
    return replace(
        config, reward=reward, actor_rollout_ref=replace(config.actor_rollout_ref, rollout=rollout)
    )


def _cause(error: BaseException) -> Exception:
    """Return the first error of tasks that ran side by side, as an exception that travels."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
