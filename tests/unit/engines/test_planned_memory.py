"""The planner's bytes of a mixture of experts are those that its ranks hold, in every pairing of layouts: of
parameters, gradients and moments, and of a block that is gathered for a pass.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_zoo import training_rows
from sharded_runs import EVEN, Run, build, loss_of
from torch import Tensor

from hybridflow.config.model import ModelConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.distributed.shards import local
from hybridflow.engines import OutputSpec
from hybridflow.engines.fsdp.sharding import sharded_modules
from hybridflow.models.adapters.lora import LoraSettings, quantized_layers
from hybridflow.models.blocks import decoder_blocks
from hybridflow.models.files.size import size_of
from hybridflow.models.tiny import create_tiny_model
from hybridflow.planner.memory import DEQUANTIZING_BYTES, RoleEngine, engine_needs
from hybridflow.planner.model_shape import load_shape
from hybridflow.planner.model_size import ModelSize
from ranks import Ranks

SIZES = {"hidden": 64, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 128}
TOKENS = 256
TOGETHER = (tuple(range(7)),)
"""All rows on ranks that have the same ones."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("experts")
    return Run(str(create_tiny_model(folder, experts=8, **SIZES)), grad_clip=None, steps=1)


def held(rank: int, run: Run, world_size: int) -> dict[str, int]:
    """The bytes that a rank holds in its first step, and those of its first block while that computes."""
    engine = build(run, world_size)
    optimizer = engine.optimizer
    assert optimizer is not None
    parameters = list(engine.module.parameters())
    codes = [each for layer in quantized_layers(engine.module).values() for each in layer.buffers()]
    found = {"weights": sum(local(each).nbytes for each in (*parameters, *codes))}
    step = optimizer.step

    def counted(lr: float) -> None:
        grads = [master.grad for master in optimizer.masters.values()]
        found["gradients"] = sum(grad.nbytes for grad in grads if grad is not None)
        step(lr)

    optimizer.step = counted
    rows = training_rows(dtype=torch.float32)
    part = run.deal[engine.layout.data_rank(rank_and_size()[0])]
    engine.train_mini_batch(
        rows.select_idxs(list(part)), OutputSpec(log_probs=True), loss_of(run, rows), run.limits
    )
    entries = [entry for rule in optimizer.rules for entry in rule.state.values()]
    found["Adam moments"] = sum(entry[name].nbytes for entry in entries for name in ("exp_avg", "exp_avg_sq"))
    block = decoder_blocks(engine.policy)[0]
    for sharded in sharded_modules(block):
        sharded.unshard()
    found["block"] = sum(local(each).nbytes for each in block.parameters())
    return found


def check(ranks: Ranks, run: Run, world_size: int, sizes: dict[str, int]) -> None:
    """Compare what each rank holds with what is told of the model by transformers, and by its config.json."""
    layout = ParallelLayout.from_keys(world_size, **sizes)
    deal = {1: TOGETHER, 2: EVEN, 4: ((0, 4), (1, 5), (2, 6), (3,))}[layout.data]
    model = ModelConfig(path=run.folder)
    counted = size_of(
        "policy",
        model,
        dtype="float32",
        device=torch.device("cpu"),
        tensor=layout.tp,
        experts_apart=layout.ep > 1,
        blocks=True,
    )
    found = ranks.run(held, replace(run, sizes=sizes, deal=deal), world_size)
    for size, bound in ((counted, 0.002), (load_shape(run.folder).size(itemsize=4), 0.01)):
        wanted = planned(size, layout, run, model)
        for one in found:
            assert one == pytest.approx(wanted, rel=bound), (sizes, bound)


def planned(size: ModelSize, layout: ParallelLayout, run: Run, model: ModelConfig) -> dict[str, int]:
    """The planner's figures."""
    needs = engine_needs(RoleEngine("actor", layout, run.fsdp, model, True, 7, 16, 64), size, device="cpu")
    parts = {part.label: part.size for part in needs.parts}
    root = size.root.on_rank(layout.tp, parts=layout.ep).all * size.itemsize
    told = {name: parts[name] for name in ("weights", "gradients", "Adam moments")}
    return {**told, "block": (parts["weights gathered for a pass"] - root) // 2}


def test_two_ranks_hold_what_was_planned(two_ranks: Ranks, run: Run) -> None:
    for sizes in ({}, {"experts": 2}, {"tensor": 2, "experts": 2}):
        check(two_ranks, run, 2, sizes)


@pytest.mark.slow
def test_four_ranks_hold_what_was_planned(four_ranks: Ranks, run: Run) -> None:
    """FSDP 2 within each part, one part for each rank, and two copies of one half each."""
    for sizes in (
        {"tensor": 2, "experts": 2},
        {"tensor": 2, "experts": 4},
        {"experts": 2},
        {"experts": 4},
        {"fsdp_size": 1, "tensor": 2, "experts": 2},
    ):
        check(four_ranks, run, 4, sizes)


def test_experts_are_whole_where_fsdp_alone_shards_them(two_ranks: Ranks, tmp_path: Path) -> None:
    """Three experts on two ranks: one rank has two of each layer, and the other has one."""
    run = Run(str(create_tiny_model(tmp_path, experts=3, **SIZES)), steps=1)
    ranks = two_ranks.run(held, run, 2)
    size = load_shape(run.folder).size(itemsize=4)
    assert ranks[0]["weights"] == pytest.approx(4 * size.at_rest(ParallelLayout(dp_shard=2)).all, rel=0.01)
    assert ranks[0]["weights"] - ranks[1]["weights"] == pytest.approx(4 * size.whole.experts / 3, rel=0.01)
    many = size.at_rest(ParallelLayout(dp_shard=16))
    assert many.all > size.whole.experts / 3, "more ranks than experts leave some without any"


def test_a_base_in_4_bits_is_whole_on_each_rank(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = create_tiny_model(tmp_path, **SIZES)
    model = ModelConfig(path=str(folder), lora_rank=4, quantization="nf4")
    run = Run(str(folder), lora=LoraSettings.from_config(model), grad_clip=None, steps=1)
    found = two_ranks.run(held, run, 2)
    cpu = torch.device("cpu")
    counted = size_of("policy", model, dtype="float32", device=cpu, lora=run.lora, blocks=True)
    told = load_shape(run.folder).size(lora_rank=4, itemsize=4, quantized=True)
    for size, bound in ((counted, 0.002), (told, 0.1)):  # config.json tells no halves of an MLP
        wanted = planned(size, ParallelLayout(dp_shard=2), run, model)
        wanted["weights"] -= DEQUANTIZING_BYTES * size.largest_quantized
        assert wanted["block"] < 2 * size.block.all, "what is in 4 bits is not gathered"
        for one in found:
            assert one == pytest.approx(wanted, rel=bound)


def test_codes_stay_on_the_device_where_fsdp_offloads_the_rest(tmp_path: Path) -> None:
    folder = create_tiny_model(tmp_path, **SIZES)
    model = ModelConfig(path=str(folder), lora_rank=4, quantization="nf4")
    fsdp = replace(Run(str(folder)).fsdp, offload_policy=True)
    size = load_shape(str(folder)).size(lora_rank=4, itemsize=2, quantized=True)
    engine = RoleEngine("actor", ParallelLayout(dp_shard=2), fsdp, model, True, 1, TOKENS, TOKENS)
    needs = engine_needs(engine, size, device="cuda")
    parts = {part.label: part for part in needs.parts}
    assert parts["weights"].on_host and not parts["weights in 4 bits"].on_host
    assert needs.between == parts["weights in 4 bits"].size > size.quantized // 2
    away = replace(fsdp, offload_policy=False, param_offload=True)
    whole = {part.label: part for part in engine_needs(replace(engine, fsdp=away), size, device="cuda").parts}
    assert whole["weights"].size == parts["weights"].size + parts["weights in 4 bits"].size


def test_a_layer_keeps_the_states_of_its_experts(run: Run) -> None:
    """What the feed-forward part of a layer keeps of a token for its gradient is about what was planned."""
    size = load_shape(run.folder).size(itemsize=4)
    model = ModelConfig(path=run.folder, enable_gradient_checkpointing=False)
    engine = RoleEngine("actor", ParallelLayout(), run.fsdp, model, True, 1, TOKENS, TOKENS)
    parts = {part.label: part.size for part in engine_needs(engine, size, device="cpu").parts}
    numbers = parts["activations of a micro-batch"] / 4 / TOKENS / size.num_layers
    feed = build(run, 1).policy.hf.model.layers[0].mlp
    weights = {each.untyped_storage().data_ptr() for each in feed.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        feed(torch.randn(1, TOKENS, size.hidden_size, requires_grad=True))
    found = sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in weights)
    # its input, which the norm before it has too, and the router's scores are beside that
    assert found / 4 / TOKENS == pytest.approx(numbers - 12 * size.hidden_size, rel=0.15)
