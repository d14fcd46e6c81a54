"""The rows of collectors: the driver's part and the stored part are together what the driver would have made;
what a run has of processes and limits is shared out.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_trainer import build, ppo_config

from hybridflow.agent.collate import collate
from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.controller.backend import Part
from hybridflow.controller.local import in_memory
from hybridflow.episodes.filters import rows_of
from hybridflow.errors import WorkerLost
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.remote import RemoteColumn, widths_of
from hybridflow.protocol.trajectory import Lineage, Segment, Trajectory
from hybridflow.trainer.ppo.columns import MASKS, STAYS, divided, needs_whole_rows, whole
from hybridflow.trainer.ppo.reward_watch import RewardWatch
from hybridflow.trainer.schedules.collector import Collector, Collectors, shared_out
from hybridflow.workers.actor import POLICY_COLUMNS

FILL = 9


def group(index: int, prompt: int, lengths: list[int], **extra: object) -> DataProto:
    """Scored rows of a group whose prompt and responses have so many tokens; each token says its place."""
    trajectories = []
    for sample, length in enumerate(lengths):
        ids = tuple(100 * index + 10 * sample + place % 3 for place in range(length))
        segment = Segment(ids, True, tuple(-token / 7 for token in ids), (index,) * length)
        facts = {"solution_str": "s" * length, "ground_truth": "g", "extra_info": {"index": index}, **extra}
        lineage = Lineage(Prompt((index,) * prompt), (segment,))
        trajectories.append(Trajectory(index, sample, (lineage,), reward=float(sample), extra=facts))
    return collate(trajectories, FILL)


def collected(*shards: list[DataProto]) -> list[DataProto]:
    """Return the driver's rows of groups, those of each list with their other columns in one shard."""
    found = []
    for groups in shards:
        lights = [divided(rows)[0] for rows in groups]
        kept = join_rows([divided(rows)[1] for rows in groups], FILL)
        shard: Part = in_memory(kept)
        number = 0
        for light in lights:
            rows = range(number, number + len(light))
            number += len(light)
            fit = (*widths_of(light), FILL)
            remote = {name: RemoteColumn.in_shard(shard, name, rows, fit) for name in (*STAYS, *MASKS)}
            found.append(light | DataProto(remote=remote))
    return found


@pytest.fixture
def groups() -> list[DataProto]:
    return [group(1, 2, [3, 1], acc=1.0), group(2, 5, [2, 7]), group(3, 1, [4, 4], acc=0.0)]


def same(got: DataProto, wanted: DataProto) -> None:
    assert sorted(got.names()) == sorted(wanted.names())
    for name in map(str, wanted.batch.keys()):
        assert got.batch[name].dtype == wanted.batch[name].dtype and torch.equal(
            got.batch[name], wanted.batch[name]
        ), name
    for name, column in wanted.non_tensor_batch.items():
        assert repr(list(got.non_tensor_batch[name])) == repr(list(column)), name


def test_both_parts_together_are_the_rows_that_the_driver_would_have_made(groups: list[DataProto]) -> None:
    lights = collected(groups[:2], groups[2:])
    assert not {*STAYS} & {*join_rows(lights, FILL).names()}
    same(whole(join_rows(lights, FILL)), join_rows(groups, FILL))
    some = ["0-3", "0-1"]  # of two shards, of a batch that is wider than both
    same(whole(rows_of(join_rows(lights, FILL), some)), rows_of(join_rows(groups, FILL), some))
    same(whole(join_rows([lights[2]], FILL)), join_rows([groups[2]], FILL))


def test_rows_of_the_driver_itself_are_whole(groups: list[DataProto]) -> None:
    assert whole(groups[0]) is groups[0]
    nothing = collate([], FILL)
    assert divided(nothing) == (nothing, nothing)


@pytest.mark.parametrize("gives_whole_rows", [False, True])
def test_a_batch_of_which_nothing_is_left_is_as_the_driver_would_have_made_it(
    groups: list[DataProto], model: Path, tmp_path: Path, *, gives_whole_rows: bool
) -> None:
    filtered = [rows_of(rows, []) for rows in collected(groups)]
    with build(ppo_config(model, tmp_path / "run")) as trainer:
        source = trainer.source
        source.collectors = cast(Any, SimpleNamespace(gives_whole_rows=gives_whole_rows))
        same(source.whole_batch(filtered, Metrics()), collate([], source.pipeline.pad_token_id))


def test_a_group_that_is_played_as_its_collector_is_lost_does_not_wait_forever() -> None:
    lost = []

    async def play(collectors: Collectors, index: int) -> None:
        client = cast(Any, SimpleNamespace(failure=None))
        with pytest.raises(WorkerLost, match="it has died"):
            await collectors.run_group(index, cast(Any, None), client)
        lost.append(index)

    class LostGroup:
        world_size = 1
        backend = SimpleNamespace(call_timeout=600.0)

        def call_one(self, rank: int, method: object, *args: object) -> None:
            if method is Collector.collect:
                if len(tasks) == 1:  # it begins before the first group hears of the loss
                    tasks.append(asyncio.create_task(play(collectors, 1)))
                raise WorkerLost("it has died")

    collectors = Collectors.__new__(Collectors)
    collectors._group = cast(Any, LostGroup())
    collectors._waiting = [{}]
    collectors._polls = set()
    tasks: list[asyncio.Task[None]] = []

    async def play_both() -> None:
        tasks.append(asyncio.create_task(play(collectors, 0)))
        await tasks[0]
        await asyncio.wait_for(tasks[1], 30)

    asyncio.run(play_both())
    assert sorted(lost) == [0, 1]


def test_a_worker_reads_the_columns_of_a_batch_with_its_widths(groups: list[DataProto]) -> None:
    batch = join_rows(collected([groups[0], groups[2]], [groups[1]]), FILL)
    read = batch.select_idxs([5, 0, 2]).select(list(POLICY_COLUMNS), []).by_reference().materialized()
    wanted = join_rows([groups[0], groups[2], groups[1]], FILL).select_idxs([5, 0, 2])
    for name in POLICY_COLUMNS:
        assert torch.equal(read.batch[name], wanted.batch[name]), name


def test_the_reward_watch_sees_the_same_without_the_tokens(groups: list[DataProto]) -> None:
    rows = join_rows([groups[1], group(4, 2, [9, 12])], FILL)
    light = divided(rows)[0]
    found = [RewardWatch().look(each, {}, 1)[0] for each in (rows, light)]
    assert found[0] == found[1] and found[0]["reward_watch/repetition"] > 0


def config(*keys: str) -> PPOConfig:
    needed = (
        "data.task.name=arithmetic_chain",
        "actor_rollout_ref.model.path=none",
        "trainer.controller=ray",
    )
    return prepare_config(PPOConfig, [*needed, "trainer.num_collectors=2", *keys]).config


def test_processes_and_limits_are_shared_out() -> None:
    keys = ("reward.num_workers=5", "reward.max_rpm=60", "reward.max_concurrent=9", "reward.max_tpm=100")
    agent = (
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.agent.max_concurrent=7",
    )
    one = shared_out(config(*keys, *agent), 2)
    assert (one.reward.num_workers, one.reward.max_concurrent) == (3, 5)
    assert (one.reward.max_rpm, one.reward.max_tpm) == (30.0, 50.0)
    assert (one.actor_rollout_ref.rollout.agent.num_workers, one.reward.sandbox_fusion.max_concurrent) == (
        1,
        32,
    )
    assert one.actor_rollout_ref.rollout.agent.max_concurrent == 4
    none = shared_out(config("reward.num_workers=0"), 2).reward
    assert (none.num_workers, none.max_concurrent, none.max_rpm) == (0, None, None)


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [((), False), (("trainer.keep_rows=true",), True), (("trainer.rollout_data_dir=there",), False)],
)
def test_who_reads_tokens_in_the_driver_gets_them(keys: tuple[str, ...], wanted: bool) -> None:
    assert needs_whole_rows(config(*keys)) is wanted
