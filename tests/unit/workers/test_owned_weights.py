"""Engines with weights of their own: they get the actor's before each step, wherever the actor is and however
it is spread.

In the place of vLLM stands a native engine over a model of its own, which takes weights by the names of the
model's files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_rollout_worker import (
    EOS,
    LORA,
    Apart,
    actor_engine,
    actor_worker,
    folder,
    generated,
    learn,
    model,
    requests,
    tokens,
)

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.controller import LocalBackend
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import RolloutError, WorkerLost
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import plain_weights
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.remote.model import ModelFacts, ReplicaPlace
from hybridflow.rollout.remote.runner import EngineDied, Submission
from hybridflow.rollout.vllm.build import build_vllm_engine
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.rollout.vllm.settings import command_line, engine_arguments
from hybridflow.workers import rollout_build
from hybridflow.workers.actor import ActorGroup
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_build import build_rollout_worker
from hybridflow.workers.rollout_group import RolloutGroup
from ranks import Ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from test_vllm_engine import Scripted

__all__ = ["folder"]
VLLM = RolloutConfig(name="vllm", max_model_len=32)


def stand_in(
    config: RolloutConfig, facts: ModelFacts, eos_token_ids: Sequence[int], place: ReplicaPlace
) -> RolloutEngine:
    """A model of its own, with zeros for weights, on the first rank of a replica."""
    if not place.leads:
        return build_vllm_engine(config, facts, eos_token_ids, place)
    own = build_policy(facts.path, device="cpu", dtype="float64", probe=False)
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.zero_()
    return NativeEngine(own, eos_token_ids=eos_token_ids)


def worker_of(folder: str, engine: FSDPEngine | None, lora: LoraSettings | None = None) -> RolloutWorker:
    rollout_build.build_vllm_engine = stand_in  # type: ignore[assignment]
    return build_rollout_worker(VLLM, actor_engine=engine, model=model(folder), eos_token_ids=EOS, lora=lora)


@pytest.fixture(autouse=True)
def builder_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_build, "build_vllm_engine", stand_in)


def expected(folder: str, updates: int, lora: LoraSettings | None = None) -> list[tuple[int, list[int]]]:
    """What one process with the actor's module generates after so many updates."""
    engine = actor_engine(folder, lora=lora)
    for _ in range(updates):
        learn(engine)
    alone = build_rollout_worker(RolloutConfig(), actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    return tokens(generated(alone, requests()))


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
@pytest.mark.parametrize("backend", [LocalBackend, Apart])
def test_it_generates_with_what_was_pushed_before_the_step(
    folder: str, backend: type[LocalBackend], lora: LoraSettings | None
) -> None:
    engine = actor_engine(folder, lora=lora)
    house = backend(
        lambda host: {
            "actor": lambda info: actor_worker(engine),
            "rollout": lambda info: worker_of(folder, None if backend is Apart else engine, lora),
        }
    )
    actor, rollout = ActorGroup(house, "actor"), RolloutGroup(house, "rollout")
    learn(engine)
    rollout.update_from(actor, 1)
    outputs = rollout.generate(requests()).outputs
    assert tokens(outputs) == expected(folder, 1, lora) and {
        each for output in outputs for each in output.policy_versions
    } == {1}
    own = house.worker("rollout").engine  # type: ignore[attr-defined]
    keep, own.update_weights = own.update_weights, lambda weights, version: None
    learn(engine)
    with pytest.raises(RolloutError, match="version 2 and has those of version 1"):
        rollout.update_from(actor, 2)
    own.update_weights = keep
    rollout.update_from(actor, 2)
    assert tokens(rollout.generate(requests()).outputs) == expected(folder, 2, lora)


def push_on_ranks(rank: int, folder: str, lora: LoraSettings | None) -> Any:
    engine = actor_engine(folder, 2, lora)
    worker = worker_of(folder, engine, lora)
    learn(engine)
    worker.renew_weights(version=1)
    return tokens(generated(worker, requests()))


@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "lora"])
def test_a_sharded_actor_fills_an_engine_on_each_rank(
    two_ranks: Ranks, folder: str, lora: LoraSettings | None
) -> None:
    assert two_ranks.run(push_on_ranks, folder, lora) == [expected(folder, 1, lora)] * 2


def push_to_a_replica(rank: int, folder: str) -> Any:
    engine = actor_engine(folder, 2)
    together = replace(VLLM, tensor_model_parallel_size=2)
    rollout_build.build_vllm_engine = stand_in  # type: ignore[assignment]
    worker = build_rollout_worker(together, actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    learn(engine)
    worker.renew_weights(version=1)
    if rank == 0:
        return tokens(generated(worker, requests()))
    with pytest.raises(RolloutError, match="the first rank of a replica serves its requests"):
        worker.engine.runner.start([Submission(0, (1,))])  # type: ignore[attr-defined]
    worker.sleep()
    worker.wake_up()
    return worker.engine.policy_version, list(generated(worker, []))


def test_ranks_of_a_replica_have_one_engine_which_all_their_shards_fill(
    two_ranks: Ranks, folder: str
) -> None:
    assert two_ranks.run(push_to_a_replica, folder) == [expected(folder, 1), (1, [])]


def drop_on_the_second_rank(rank: int, folder: str) -> str:
    """The first rank's engine takes one tensor and dies; the second one reads on."""
    engine = actor_engine(folder, 2)
    worker = worker_of(folder, engine)

    def die(weights: Iterable[Any], version: int) -> None:
        next(iter(weights))
        raise EngineDied("it died")

    if rank == 0:
        worker.engine.update_weights = die  # type: ignore[method-assign]
    try:
        worker.renew_weights(version=1)
    except EngineDied as error:
        assert isinstance(error, WorkerLost)
        return str(error)
    return f"version {worker.engine.policy_version}"


def test_an_engine_that_dies_of_a_push_leaves_no_rank_waiting(two_ranks: Ranks, folder: str) -> None:
    assert two_ranks.run(drop_on_the_second_rank, folder) == ["it died", "version 1"]


def test_memory_of_an_engine_beside_the_trainer_in_the_order_of_a_run(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step generates, trains and pushes; a validation generates between two steps without a push.

    Between generations nothing of the engine is on the device, nor is a copy of its weights kept on the CPU.
    """
    engine, runner = actor_engine(folder), Scripted()
    monkeypatch.setattr(
        rollout_build, "build_vllm_engine", lambda *_, **__: VLLMEngine(runner, eos_token_ids=EOS)
    )
    worker = build_rollout_worker(VLLM, actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    asked = requests(groups=2, n=1)

    def generate(version: int) -> list[str]:
        """Generate with weights of `version`; return what the engine was told since it was asked last."""
        outputs = generated(worker, asked)
        assert {each for output in outputs for each in output.policy_versions} == {version}
        assert runner.mapped == set()
        told = [each for each in runner.log if isinstance(each, str)]
        runner.log.clear()
        return told

    worker.renew_weights(version=0)
    assert generate(0) == ["push 0", "sleep 2"]
    for version in (1, 2):
        learn(engine)
        worker.renew_weights(version=version)
        assert runner.mapped == {"weights"}, "the cache has no memory before the engine generates"
        new = ["wake ['weights']", f"push {version}", "wake ['kv_cache']", "sleep 2"]
        assert generate(version) == new
    sums = dict(runner.received.checksums)
    assert generate(2) == new, "a validation: the same weights once more"
    assert runner.received.checksums == sums
    learn(engine)
    worker.renew_weights(version=3)
    worker.renew_weights(version=3)  # what a resumed run pushes before its first step
    assert generate(3)[:3] == ["wake ['weights']", "push 3", "push 3"]


def test_memory_of_an_engine_whose_weights_come_from_elsewhere(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody pushes them again before the next generation, so the engine keeps them."""
    runner = Scripted()
    monkeypatch.setattr(
        rollout_build, "build_vllm_engine", lambda *_, **__: VLLMEngine(runner, eos_token_ids=EOS)
    )
    worker = build_rollout_worker(VLLM, actor_engine=None, model=model(folder), eos_token_ids=EOS)
    worker.engine.update_weights([("w", torch.ones(1))], 4)
    for _ in range(2):
        generated(worker, requests(groups=1, n=1))
    said = [each for each in runner.log if isinstance(each, str)]
    assert said == ["push 4", "sleep 1", "wake ['weights', 'kv_cache']", "sleep 1"] and not runner.mapped


def test_plain_weights_are_those_of_a_file_and_tied_ones_have_each_name(folder: str) -> None:
    adapted = actor_engine(folder, lora=LORA).module
    assert isinstance(adapted, PolicyModel)
    found = dict(plain_weights(adapted))
    plain = build_policy(folder, device="cpu", dtype="float64", probe=False)
    assert set(found) == set(plain.hf.state_dict())
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    half = dict(
        plain_weights(plain, {"hf.lm_head.weight": torch.bfloat16, "hf.model.norm.weight": torch.bfloat16})
    )
    assert half["lm_head.weight"].dtype == half["model.norm.weight"].dtype == torch.bfloat16


def test_keys_become_arguments_of_vllm(folder: str) -> None:
    facts = ModelFacts(
        folder, torch.device("cpu"), "float32", override_config={"max_position_embeddings": 48}
    )
    arguments = engine_arguments(
        RolloutConfig(name="vllm", max_model_len=48, max_num_seqs=7, max_num_batched_tokens=9), facts
    )
    assert (
        arguments["enforce_eager"]
        and not arguments["enable_chunked_prefill"]
        and arguments["max_num_batched_tokens"] == 48
    )
    assert (
        arguments["kv_cache_memory_bytes"] == 8 * 128 * 2 * 2 * 2 * 8 * 4 and "quantization" not in arguments
    )
    line = command_line(arguments)
    assert (
        "--no-enable-chunked-prefill" in line
        and line[line.index("--hf-overrides") + 1] == '{"max_position_embeddings": 48}'
    )
    on_cuda = engine_arguments(
        RolloutConfig(name="vllm", quantization="fp8"), ModelFacts(folder, torch.device("cuda"), "bfloat16")
    )
    assert (
        on_cuda["enable_sleep_mode"]
        and on_cuda["quantization"] == "fp8"
        and "kv_cache_memory_bytes" not in on_cuda
    )
