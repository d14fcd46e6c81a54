"""Rollout workers: with the actor's module, with its shards, and in processes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hybridflow.config.actor_rollout_ref import ActorConfig, RolloutConfig
from hybridflow.config.model import OptimConfig
from hybridflow.controller import LocalBackend, MeshInfo
from hybridflow.controller.mesh import cut_items, plan_items
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.shards import Box, bit_sum, local
from hybridflow.engines import BatchLimits
from hybridflow.engines.build import build_engine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ConfigError, ModelError, RolloutError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats, SamplingParams
from hybridflow.rollout.hf.engine import HFEngine
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.weight_sync import holding, reshard
from hybridflow.weight_sync.push import WeightShare, deal_tensors
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_build import build_rollout_worker
from hybridflow.workers.rollout_group import RolloutGroup
from ranks import Ranks

LIMITS = BatchLimits(max_tokens=64)
EOS = [2]
LORA = LoraSettings(rank=2, seed=3)
SLICED = RolloutConfig(tensor_model_parallel_size=2)
HF = RolloutConfig(name="hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=33,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
        pad_token_id=0,
        **sizes,
    )
    path = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
    return str(path)


def model(folder: str) -> dict[str, Any]:
    return {"path": folder, "device": torch.device("cpu"), "dtype": "float64"}


def actor_engine(
    folder: str, world_size: int = 1, lora: LoraSettings | None = None, stages: int = 1
) -> FSDPEngine:
    optim = OptimConfig(lr=1e-2)
    return build_engine(
        "policy",
        model(folder),
        name="actor",
        optim=optim,
        layout=ParallelLayout.from_keys(world_size, pipeline=stages),
        lora=lora,
    )


def actor_worker(engine: FSDPEngine) -> ActorWorker:
    return ActorWorker(engine, ActorConfig(), temperature=1.0, log_prob_limits=LIMITS)


@torch.no_grad()
def learn(engine: FSDPEngine) -> None:
    """A change of the trained weights that is the same however they are spread."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            local(parameter).mul_(1.25).add_(0.01)


def requests(groups: int = 5, n: int = 3) -> list[GenerationRequest]:
    sampling = SamplingParams(max_tokens=7)
    prompts = [(*range(3, 5 + group % 3), 4 + group) for group in range(groups)]
    return [
        GenerationRequest(10 * i + j, Prompt(prompt), sampling, seed=10 * i + j)
        for j in range(n)
        for i, prompt in enumerate(prompts)
    ]


def tokens(outputs: list[GenerationOutput]) -> list[tuple[int, list[int]]]:
    return [(output.request_id, output.token_ids) for output in outputs]


def generated(worker: RolloutWorker, asked: Sequence[GenerationRequest]) -> list[GenerationOutput]:
    """Outputs of one worker, in the order of the requests; none on the later ranks of a replica."""
    if worker.ranks.rank == 0:
        worker.submit(asked)
    worker.resume(closed=True)
    found: dict[int, GenerationOutput] = {}
    while worker.ranks.rank == 0 and len(found) < len(asked):
        found |= {output.request_id: output for output in worker.collect(60.0).outputs}
    worker.pause()
    if worker.ranks.rank > 0:
        assert not worker.collect(0.0).outputs
        return []
    return [found[request.request_id] for request in asked]


class Apart(LocalBackend):
    """One process that says it is two."""

    def are_colocated(self, role: str, other: str) -> bool:
        return False


def local_groups(folder: str, backend: type[LocalBackend]) -> tuple[ActorGroup, RolloutGroup, FSDPEngine]:
    engine = actor_engine(folder)
    shared = None if backend is Apart else engine

    def rollout(info: object) -> RolloutWorker:
        return build_rollout_worker(
            RolloutConfig(), actor_engine=shared, model=model(folder), eos_token_ids=EOS
        )

    house = backend(lambda host: {"actor": lambda info: actor_worker(engine), "rollout": rollout})
    return ActorGroup(house, "actor"), RolloutGroup(house, "rollout"), engine


def test_in_one_process_the_module_is_shared_and_nothing_moves(folder: str) -> None:
    actor, rollout, engine = local_groups(folder, LocalBackend)
    worker = rollout.backend.worker("rollout")  # type: ignore[attr-defined]
    assert isinstance(worker, RolloutWorker) and isinstance(worker.engine, NativeEngine)
    assert worker.engine.policy is engine.module and worker.pushed is None
    before = tokens(rollout.generate(requests()).outputs)
    learn(engine)
    rollout.update_from(actor, 1)
    assert actor.backend.worker("actor")._export is None, "nothing was put together"  # type: ignore[attr-defined]
    after = rollout.generate(requests()).outputs
    assert tokens(after) != before and {
        version for output in after for version in output.policy_versions
    } == {1}
    worker.update_weights([], version=5)
    assert worker.engine.policy_version == 1


@pytest.mark.parametrize("size", [1, 3])
def test_a_rollout_on_other_processes_than_the_actor_whose_module_it_shares_is_refused(
    folder: str, size: int
) -> None:
    class Sized(LocalBackend):
        """One process that says how many ranks its roles have."""

        def mesh(self, role: str) -> MeshInfo:
            return MeshInfo({"actor": 2, "rollout": size}[role])

    actor, rollout, _ = local_groups(folder, Sized)
    with pytest.raises(
        RolloutError,
        match=rf"rollout shares .* has {size} ranks where actor has 2.*trainer\.placement\.rollout",
    ):
        rollout.update_from(actor, 1)


def test_a_replica_of_its_own_generates_with_what_was_pushed(folder: str) -> None:
    actor, rollout, engine = local_groups(folder, Apart)
    together = NativeEngine(engine.module, eos_token_ids=EOS)  # type: ignore[arg-type]

    def wanted() -> list[tuple[int, list[int]]]:
        found = {output.request_id: output for output in together.generate(requests())}
        return tokens([found[request.request_id] for request in requests()])

    outputs = rollout.generate(requests()).outputs
    assert tokens(outputs) == wanted(), "both begin as the folder says"
    learn(engine)
    stale = rollout.generate(requests()).outputs
    assert tokens(stale) == tokens(outputs), "it says what it has, whoever asks"
    assert {version for output in stale for version in output.policy_versions} == {0}
    rollout.update_from(actor, 1)
    again = rollout.generate(requests()).outputs
    assert tokens(again) == wanted() != tokens(outputs)
    assert {version for output in again for version in output.policy_versions} == {1}
    # a step that changed nothing (its learning rate was 0, or it was skipped) is no error
    rollout.update_from(actor, 2)
    assert tokens(rollout.generate(requests()).outputs) == wanted()


def test_a_push_that_does_not_bring_the_weights_is_an_error(folder: str) -> None:
    actor, rollout, engine = local_groups(folder, Apart)
    learn(engine)
    worker = rollout.backend.worker("rollout")  # type: ignore[attr-defined]
    (share,) = actor.call_each(ActorWorker.export_buckets, [1])
    nothing, less = replace(share, tensors={}), dict(share.tensors)
    lost = list(less)[4]
    del less[lost]
    for shares, version, text in [
        ([nothing], 1, "embed_tokens"),
        ([replace(share, tensors=less)], 1, lost),
        ([share], 2, "weights of version 1"),
        ([], 1, "no weights"),
        ([replace(share, checksums={**share.checksums, "hf.more": 3})], 1, "hf.more"),
    ]:
        with pytest.raises(RolloutError, match=text):
            worker.update_weights(shares, version=version)
        assert worker.engine.policy_version == 0
    bits = share.tensors[lost].clone()
    bits.view(torch.int64).view(-1)[-1] ^= 1
    with pytest.raises(RolloutError, match=lost):
        worker.update_weights([replace(share, tensors={**share.tensors, lost: bits})], version=1)
    worker.update_weights([share], version=1)
    assert worker.engine.policy_version == 1


@pytest.mark.parametrize("where", ["trainer", "replica"])
def test_the_base_under_adapters_is_read_by_turns_and_a_change_of_it_is_found(
    folder: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = actor_engine(folder, lora=LORA)
    actor = actor_worker(engine)
    worker = build_rollout_worker(
        RolloutConfig(), actor_engine=None, model=model(folder), eos_token_ids=EOS, lora=LORA
    )
    base = sum(parameter.numel() for parameter in engine.module.parameters() if not parameter.requires_grad)
    adapters = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    read: list[int] = []

    def counting(part: Tensor, box: Box) -> Tensor:
        read.append(part.numel())
        return bit_sum(part, box)

    monkeypatch.setattr(reshard, "bit_sum", counting)
    monkeypatch.setattr(holding, "bit_sum", counting)

    def push(version: int) -> int:
        read.clear()
        learn(engine)
        worker.update_weights([actor.export_buckets(version)], version=version)
        return sum(read)

    assert push(1) == 2 * (base + adapters)
    turns = [push(version) for version in range(2, 18)]
    assert sum(turns) == 2 * (base + 16 * adapters) and max(turns) < base
    owner = engine.module if where == "trainer" else worker.engine.policy  # type: ignore[attr-defined]
    frozen = next(
        parameter
        for name, parameter in owner.named_parameters()
        if "layers.1.mlp.up_proj" in name and "lora" not in name
    )
    frozen.data.view(torch.int64)[2, 1] ^= 1
    with pytest.raises(RolloutError, match=r"differs is hf\.model\.layers\.1\.mlp\.up_proj\.base"):
        for version in range(18, 34):
            push(version)


# ---- ranks
# --------------------------------------------------------------------------------------------------------


def generate_on_ranks(
    rank: int,
    folder: str,
    config: RolloutConfig,
    lora: bool,
    stages: int,
    parts: list[list[GenerationRequest]],
) -> dict[str, Any]:
    settings = LORA if lora else None
    engine = actor_engine(folder, 2, settings, stages)
    worker = build_rollout_worker(
        config, actor_engine=engine, model=model(folder), eos_token_ids=EOS, lora=settings
    )
    found = []
    for version in (0, 1):
        worker.renew_weights(version=version)
        outputs = generated(worker, parts[rank])
        found.append(outputs)
        assert {each for output in outputs for each in output.policy_versions} <= {version}
        learn(engine)
    with pytest.raises(RolloutError, match="wake_up"):
        worker.engine.generate(requests())
    own = worker.engine.model if isinstance(worker.engine, HFEngine) else worker.engine.policy  # type: ignore[attr-defined]
    assert own is not engine.module
    resting = sum(parameter.untyped_storage().nbytes() for parameter in own.parameters())
    return {"outputs": found, "resting": resting, "stats": worker.engine.stats}


@pytest.mark.parametrize(
    ("config", "lora", "stages"),
    [
        pytest.param(RolloutConfig(), False, 1, id="native"),
        pytest.param(SLICED, False, 1, id="native, tensor parallel"),
        pytest.param(RolloutConfig(), True, 1, id="native, lora"),
        pytest.param(SLICED, True, 1, id="native, tensor parallel, lora"),
        pytest.param(RolloutConfig(), False, 2, id="native, actor in stages"),
        pytest.param(SLICED, True, 2, id="native, tensor parallel, lora, actor in stages"),
        pytest.param(HF, False, 1, id="hf"),
        pytest.param(HF, True, 1, id="hf, lora"),
    ],
)
def test_replicas_of_a_sharded_actor_generate_what_one_process_does(
    two_ranks: Ranks, folder: str, config: RolloutConfig, lora: bool, stages: int
) -> None:
    tensor = config.tensor_model_parallel_size
    engine = actor_engine(folder, lora=LORA if lora else None)
    whole = replace(config, tensor_model_parallel_size=1)
    alone = build_rollout_worker(whole, actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    mesh = MeshInfo(2, (("dp", 2 // tensor), ("tp", tensor)))
    sharded = cut_items(requests(), plan_items(requests(), mesh))
    parts = [sharded[mesh.part_of(rank)] for rank in range(2)]
    assert tensor == 2 or all(0 < len(part) < len(requests()) for part in parts)
    ranks = two_ranks.run(generate_on_ranks, folder, config, lora, stages, parts)
    for version in (0, 1):
        expected = generated(alone, requests())
        outputs = [output for rank in mesh.leaders for output in ranks[rank]["outputs"][version]]
        answers = {output.request_id: output for output in outputs}
        together = [answers[request.request_id] for request in requests()]
        assert tokens(together) == tokens(expected)
        for ours, theirs in zip(together, expected):
            assert ours.log_probs == pytest.approx(theirs.log_probs, abs=1e-9)
        learn(engine)
    assert [found["resting"] for found in ranks] == [0, 0]
    if tensor == 1:
        joined = RolloutStats.join([found["stats"] for found in ranks], together=True)
        one = alone.engine.stats
        assert (joined.generated_tokens, joined.prefill_tokens) == (
            one.generated_tokens,
            one.prefill_tokens,
        ), "a group stays together"
        assert joined.seconds == max(found["stats"].seconds for found in ranks)


def empty_part(rank: int, folder: str) -> int:
    worker = build_rollout_worker(
        RolloutConfig(), actor_engine=actor_engine(folder, 2), model=model(folder), eos_token_ids=EOS
    )
    return len(generated(worker, requests()[:1] if rank == 0 else []))


def test_a_rank_without_requests_sends_its_shards(two_ranks: Ranks, folder: str) -> None:
    assert two_ranks.run(empty_part, folder) == [1, 0]


def push_on_ranks(rank: int, folder: str, tensor: int, lora: bool, stages: int) -> dict[str, Any]:
    """Both ranks train, and both are also a replica (or two) that has weights of its own."""
    settings = LORA if lora else None
    engine = actor_engine(folder, 2, settings, stages)
    actor = actor_worker(engine)
    config = RolloutConfig(tensor_model_parallel_size=tensor)
    worker = build_rollout_worker(
        config, actor_engine=None, model=model(folder), eos_token_ids=EOS, lora=settings
    )
    before = generated(worker, requests())
    learn(engine)
    own = actor.export_buckets(1)
    shares: list[WeightShare] = [own, own]
    dist.all_gather_object(shares, own)
    worker.update_weights(shares, version=1)
    after = generated(worker, requests())
    learn(engine)
    with pytest.raises(RolloutError, match="version 2"):  # of rank 1's tensors none arrive
        late = actor.export_buckets(2)
        shares = [late, late]
        dist.all_gather_object(shares, late)
        worker.update_weights([shares[0], replace(shares[1], tensors={})], version=2)
    return {
        "before": before,
        "after": after,
        "bytes": sum(tensor.nbytes for tensor in own.tensors.values()),
        "names": list(own.tensors),
    }


@pytest.mark.parametrize(
    ("tensor", "lora", "stages"), [(1, False, 1), (2, False, 1), (2, True, 1), (2, False, 2)]
)
def test_shards_are_pushed_to_replicas_of_their_own(
    two_ranks: Ranks, folder: str, tensor: int, lora: bool, stages: int
) -> None:
    engine = actor_engine(folder, lora=LORA if lora else None)
    alone = build_rollout_worker(RolloutConfig(), actor_engine=engine, model=model(folder), eos_token_ids=EOS)
    expected = [tokens(generated(alone, requests()))]
    learn(engine)
    expected.append(tokens(generated(alone, requests())))
    found = two_ranks.run(push_on_ranks, folder, tensor, lora, stages)
    for rank in found[::tensor]:
        assert [tokens(rank["before"]), tokens(rank["after"])] == expected and expected[0] != expected[1]
    names = [name for rank in found for name in rank["names"]]
    trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    assert sorted(names) == sorted(trained), (
        "each trained tensor once, and of an adapted model only the adapters"
    )
    sizes = [parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad]
    assert abs(found[0]["bytes"] - found[1]["bytes"]) <= 8 * max(sizes)


def not_divisible(rank: int, folder: str) -> tuple[str, str]:
    engine = actor_engine(folder, 2)
    with pytest.raises(ConfigError) as sizes:
        build_rollout_worker(
            RolloutConfig(tensor_model_parallel_size=3),
            actor_engine=engine,
            model=model(folder),
            eos_token_ids=EOS,
        )
    module = engine.module
    assert isinstance(module, PolicyModel)
    module.config.num_attention_heads = 3
    with pytest.raises(ModelError) as heads:
        build_rollout_worker(
            RolloutConfig(tensor_model_parallel_size=2),
            actor_engine=engine,
            model=model(folder),
            eos_token_ids=EOS,
        )
    return str(sizes.value), str(heads.value)


def test_what_tensor_parallel_replicas_cannot_be(two_ranks: Ranks, folder: str) -> None:
    for sizes, heads in two_ranks.run(not_divisible, folder):
        assert "tensor_model_parallel_size=3 does not divide the 2 rank" in sizes
        assert (
            "actor_rollout_ref.rollout.tensor_model_parallel_size=2 does not divide num_attention_heads=3"
            in heads
        )


def test_tensors_are_dealt_by_size() -> None:
    assert deal_tensors({"a": 4, "b": 3, "c": 2, "d": 3}, 2) == {"a": 0, "b": 1, "c": 1, "d": 0}
