"""Rounded weights as the rollout of a run: of the actor's module, of its shards, and of pushed weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_rollout_worker import EOS, LORA, actor_worker, generated, learn, requests, tokens
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines.build import build_engine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.copies.quantized_copy import QuantizedCopy
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_build import build_rollout_worker
from ranks import Ranks

INT8 = RolloutConfig(quantization="int8")
FLOAT16 = RolloutConfig(quantization="float16")
"""Slices of float16 weights are the slices of the whole's, so any number of ranks samples the same tokens."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose layers have sizes that are rounded, cut in two as well."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    path = tmp_path_factory.mktemp("wide")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=33, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, **sizes
        )
        LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def model(folder: str) -> dict[str, Any]:
    return {"path": folder, "device": torch.device("cpu"), "dtype": "float32"}


def actor_engine(folder: str, world_size: int = 1, lora: LoraSettings | None = None) -> FSDPEngine:
    layout = ParallelLayout.from_keys(world_size)
    optim = OptimConfig(lr=1e-2)
    return build_engine("policy", model(folder), name="actor", optim=optim, layout=layout, lora=lora)


def rounded_alone(policy: PolicyModel, kind: str) -> list[tuple[int, list[int]]]:
    """The tokens of a copy that is rounded now, and of nothing else."""
    engine = NativeEngine(policy, eos_token_ids=EOS, quantized=QuantizedCopy(policy, kind))
    found = {output.request_id: output for output in engine.generate(requests())}
    return tokens([found[request.request_id] for request in requests()])


def versions(outputs: list[GenerationOutput]) -> set[int]:
    return {version for output in outputs for version in output.policy_versions}


def resting(worker: RolloutWorker) -> int:
    """Bytes of weights of its own that a sleeping engine keeps."""
    assert isinstance(worker.engine, NativeEngine) and worker.engine.quantized is not None
    own = sum(weight.numel() for weight in worker.engine.model.parameters())
    return own + worker.engine.quantized.nbytes


def test_copies_of_the_actors_module_follow_it(wide: str) -> None:
    engine = actor_engine(wide)
    worker = build_rollout_worker(INT8, actor_engine=engine, model=model(wide), eos_token_ids=EOS)
    whole = build_rollout_worker(RolloutConfig(), actor_engine=engine, model=model(wide), eos_token_ids=EOS)
    seen = []
    for version in (0, 1):
        worker.renew_weights(version=version)
        before = {name: weight.detach().clone() for name, weight in engine.policy.named_parameters()}
        outputs = generated(worker, requests())
        assert tokens(outputs) == rounded_alone(engine.policy, "int8") and versions(outputs) == {version}
        assert all(torch.equal(weight, before[name]) for name, weight in engine.policy.named_parameters())
        assert resting(worker) == 0
        seen.append(tokens(outputs))
        learn(engine)
    assert seen[0] != seen[1]
    assert rounded_alone(engine.policy, "int8") != tokens(generated(whole, requests()))


@pytest.mark.parametrize("kind", [INT8, FLOAT16])
def test_pushed_weights_are_rounded_where_they_arrive(wide: str, kind: RolloutConfig) -> None:
    engine = actor_engine(wide)
    actor = actor_worker(engine)
    worker = build_rollout_worker(kind, actor_engine=None, model=model(wide), eos_token_ids=EOS)
    assert tokens(generated(worker, requests())) == rounded_alone(engine.policy, str(kind.quantization))
    learn(engine)
    worker.update_weights([actor.export_buckets(1)], version=1)
    outputs = generated(worker, requests())
    assert tokens(outputs) == rounded_alone(engine.policy, str(kind.quantization))
    assert versions(outputs) == {1}


def test_requests_that_run_go_on_with_weights_rounded_anew(wide: str) -> None:
    engine = actor_engine(wide)
    quantized = QuantizedCopy(engine.policy, "int8")
    native = NativeEngine(engine.policy, eos_token_ids=[], quantized=quantized, recompute_on_update=True)
    session = native.open()
    session.add(requests(2, 1))
    session.step()
    session.step()
    learn(engine)
    native.set_version(1)
    fresh = QuantizedCopy(engine.policy, "int8")
    fresh.refresh()
    for name, copies in quantized._copies.items():
        assert torch.equal(copies[0].numbers, fresh._copies[name][0].numbers), name  # type: ignore[attr-defined]
    outputs = []
    while not session.idle:
        outputs += session.step()
    session.close()
    assert versions(outputs) == {0, 1}


def test_offloaded_weights_are_on_the_device_only_while_they_are_rounded(
    wide: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(
        "policy",
        model(wide),
        name="actor",
        optim=None,
        fsdp=FSDPConfig(param_offload=True),
        layout=ParallelLayout.from_keys(1),
    )
    seen = []
    for name in ("onload", "offload"):
        monkeypatch.setattr(engine, name, lambda name=name: seen.append(name))
    taken = QuantizedCopy.refresh
    monkeypatch.setattr(QuantizedCopy, "refresh", lambda quantized: seen.append("round") or taken(quantized))
    worker = build_rollout_worker(INT8, actor_engine=engine, model=model(wide), eos_token_ids=EOS)
    assert isinstance(worker.engine, NativeEngine) and worker.engine.asleep
    for _ in range(2):
        generated(worker, requests())
    assert seen == 2 * ["onload", "round", "offload"]


def generate_on_ranks(rank: int, folder: str, lora: bool, tensor: int) -> dict[str, Any]:
    settings = LORA if lora else None
    engine = actor_engine(folder, 2, settings)
    config = RolloutConfig(quantization="float16", tensor_model_parallel_size=tensor)
    worker = build_rollout_worker(
        config, actor_engine=engine, model=model(folder), eos_token_ids=EOS, lora=settings
    )
    found = []
    for version in (0, 1):
        worker.renew_weights(version=version)
        found.append(tokens(generated(worker, requests())))
        learn(engine)
    whole = sum(weight.numel() for weight in worker.engine.policy.parameters())  # type: ignore[attr-defined]
    return {"tokens": found, "resting": resting(worker) + whole}


@pytest.mark.parametrize(("lora", "tensor"), [(False, 1), (True, 1), (False, 2)])
def test_shards_are_gathered_and_rounded(two_ranks: Ranks, wide: str, lora: bool, tensor: int) -> None:
    settings = LORA if lora else None
    engine = actor_engine(wide, lora=settings)
    alone = build_rollout_worker(
        FLOAT16, actor_engine=engine, model=model(wide), eos_token_ids=EOS, lora=settings
    )
    expected = []
    for _ in range(2):
        alone.renew_weights(version=len(expected))
        expected.append(tokens(generated(alone, requests())))
        learn(engine)
    assert expected[0] != expected[1]
    for rank, found in enumerate(two_ranks.run(generate_on_ranks, wide, lora, tensor)):
        assert found["resting"] == 0
        if rank < 2 // tensor:  # the later ranks of a replica give nothing
            assert found["tokens"] == expected


def test_float64_models_are_refused(wide: str) -> None:
    of_tests = {**model(wide), "dtype": "float64"}
    with pytest.raises(ModelError, match=r"quantization=int8 with a model in float64.*model\.dtype"):
        build_rollout_worker(INT8, actor_engine=None, model=of_tests, eos_token_ids=EOS)
