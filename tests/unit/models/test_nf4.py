"""NF4 against a slow reference written from the paper, layers in it against plain layers with the dequantized
weight, and a base in it through loading, gradients, exports and merging, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM
from zoo import packed_rows, tiny_hf, tiny_rows

from hybridflow.config.model import NF4_BLOCK, ModelConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines.build import build_engine
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import (
    LoraSettings,
    adapted_layers,
    adapters_off,
    add_lora,
    fold_adapters,
    plain_state,
    quantized_layers,
    saved_names,
)
from hybridflow.models.exact_mode import ExactMode, join_sums
from hybridflow.models.files import sharded_load
from hybridflow.models.files.build import build_policy, load_saved
from hybridflow.models.files.build_score import build_score
from hybridflow.models.files.export import save_hf
from hybridflow.models.files.sharded_load import materialise, meta_model
from hybridflow.models.files.size import size_of
from hybridflow.models.nf4 import LEVELS, NF4Linear, dequantize, quantize
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.planner.memory import DEQUANTIZING_BYTES, RoleEngine, engine_needs
from hybridflow.planner.model_shape import load_shape

LORA = LoraSettings(rank=4, alpha=8, seed=3, exclude_modules="o_proj", quantization="nf4")
"""One kind of layers is quantized and gets no adapter."""
SIZES = {"hidden": 40, "intermediate": 72, "heads": 2, "kv_heads": 1}
"""The numbers of some weights are no multiple of a block."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(tmp_path_factory.mktemp("models") / "tiny", **SIZES)


def reference_levels() -> list[float]:
    """The levels as the paper makes them: quantiles of N(0, 1) at equal steps of probability on either side
    of 0, eight below and nine above, which share 0; divided by the largest.
    """
    most = 1 - (1 / 32 + 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(0.5 + (most - 0.5) * step / 8) for step in range(1, 9)]
    below = [-quantile(0.5 + (most - 0.5) * step / 7) for step in range(1, 8)]
    return sorted(level / max(above) for level in (*below, 0.0, *above))


def reference(numbers: list[float]) -> list[tuple[int, ...]]:
    """The codes that are nearest to each number, in float64: two of them where it is half-way but for
    roundings of float32.
    """
    found = []
    for start in range(0, len(numbers), 64):
        block = numbers[start : start + 64]
        scale = max(map(abs, block))
        for number in block:
            ratio = number / scale if scale else 0.0
            distances = [abs(ratio - level) for level in LEVELS]
            near = min(distances)
            found.append(tuple(code for code, each in enumerate(distances) if each <= near + 1e-7))
    return found


def codes_of(codes: Tensor, count: int) -> list[int]:
    return [code for byte in codes.tolist() for code in (byte // 16, byte % 16)][:count]


def check(weight: Tensor) -> None:
    codes, scales = quantize(weight)
    numbers = weight.double().flatten().tolist()
    assert len(scales) == math.ceil(len(numbers) / 64) and len(codes) == 32 * len(scales)
    found = codes_of(codes, len(numbers))
    assert all(code in wanted for code, wanted in zip(found, reference(numbers), strict=True))
    values = dequantize(codes, scales, weight.shape, weight.dtype)
    assert values.shape == weight.shape and values.dtype == weight.dtype
    for place, (code, value) in enumerate(zip(found, values.flatten(), strict=True)):
        scale = max(map(abs, numbers[place // 64 * 64 : place // 64 * 64 + 64]))
        wanted = torch.tensor(LEVELS[code] * scale, dtype=torch.float64).float().to(weight.dtype)
        assert value.equal(wanted)


def test_the_levels_are_the_papers() -> None:
    assert list(LEVELS) == pytest.approx(reference_levels(), abs=1e-6)
    assert torch.tensor(LEVELS).double().tolist() == list(LEVELS), "float32 holds them"
    assert NF4_BLOCK == 64


def test_each_level_is_kept_whatever_the_scale() -> None:
    for scale in (1.0, 3.5, 1e-30, 2e38):
        weight = torch.tensor([*LEVELS] * 4) * scale
        codes, scales = quantize(weight)
        assert sorted(set(codes_of(codes, 64))) == list(range(16))
        back = dequantize(codes, scales, weight.shape, torch.float32)
        again = quantize(back)
        assert again[0].equal(codes) and again[1].equal(scales), "rounding twice is rounding once"
        assert back.equal(weight)


@pytest.mark.parametrize("shape", [(1,), (63,), (64,), (65,), (3, 43), (16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sizes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    check(torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=70))
def test_any_numbers(numbers: list[float]) -> None:
    """Also zeros alone, numbers beside which others vanish, and numbers below the smallest normal one."""
    weight = torch.tensor(numbers)
    codes, scales = quantize(weight)
    wanted = reference(weight.double().tolist())
    tiny = float(torch.finfo(torch.float32).tiny)
    for place, (code, near) in enumerate(zip(codes_of(codes, len(numbers)), wanted, strict=True)):
        largest = float(scales[place // 64])
        assert code in near or largest < 1e7 * tiny, "but for ratios of numbers that have few bits"
        assert bool(dequantize(codes, scales, weight.shape, torch.float32).isfinite().all())


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_refused(odd: float) -> None:
    layer = nn.Linear(9, 3)
    layer.weight.data[1, 2] = odd
    with pytest.raises(ModelError, match=r"q_proj\.weight holds NaN or infinity"):
        NF4Linear.replace(layer, "q_proj.weight")
    with pytest.raises(ModelError, match="NaN or infinity"):
        quantize(torch.tensor([1e39], dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("split", [False, True])
def test_a_layer_computes_as_a_plain_one_with_its_weight(
    dtype: torch.dtype, bias: bool, split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    layer = nn.Linear(800, 70, bias=bias, dtype=dtype).requires_grad_(False)
    NF4Linear.replace(layer, "weight")
    assert isinstance(layer, NF4Linear) and list(layer.state_dict()) == ["bias"] * bias
    weight = layer.weight
    product: Callable[..., Tensor] = linear
    if split:
        mode = ExactMode(32, sum_step=768)
        mode.split_sums(layer)
        product = mode.product
    counted: list[int] = []
    monkeypatch.setattr(
        "hybridflow.models.nf4.dequantize", lambda *args: counted.append(1) or dequantize(*args)
    )
    for shape in ((2, 7, 800), (5, 800), (800,)):
        states = torch.randn(shape, dtype=dtype, generator=draw)
        ours, theirs = (states.clone().requires_grad_() for _ in range(2))
        counted.clear()
        out = layer(ours)
        wanted = product(theirs, weight, layer.bias)
        assert out.equal(wanted) and counted == [1]
        grad = torch.randn(out.shape, dtype=dtype, generator=draw)
        out.backward(grad)
        wanted.backward(grad)
        assert ours.grad is not None and ours.grad.equal(theirs.grad)
        assert len(counted) > 1, "the backward pass has dequantized again"
    with torch.no_grad():
        assert layer(states).equal(wanted)
    join_sums(layer)
    assert layer.product is linear
    layer.restore(weight)
    assert type(layer) is nn.Linear and layer.weight.equal(weight) and not list(layer.buffers())


def test_no_dequantized_weight_waits_for_the_backward_pass() -> None:
    """What autograd keeps of a layer between its passes is no tensor of the weight's size."""
    layer = nn.Linear(96, 80).requires_grad_(False)
    NF4Linear.replace(layer, "weight")
    out = layer(torch.randn(4, 96, requires_grad=True))
    node = out.grad_fn
    assert node is not None
    saved = [getattr(node, name).data for name in dir(node) if name.startswith("_raw_saved_")]
    assert any(isinstance(each, tuple) for each in saved), "the weight is kept as a place in it"
    assert not [each for each in saved if isinstance(each, Tensor) and each.numel() >= 96 * 80]


def build(folder: Path, lora: LoraSettings = LORA, dtype: str = "float32") -> FSDPEngine:
    model = {"path": str(folder), "device": "cpu", "dtype": dtype}
    engine = build_engine("policy", model, name="actor", optim=OptimConfig(lr=1e-2), grad_clip=1.0, lora=lora)
    assert isinstance(engine, FSDPEngine)
    return engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_quantized_as_they_are_read(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_load, "load_whole", lambda *args: pytest.fail("the model was loaded whole"))
    module = build(folder, dtype=dtype).policy
    whole = build_policy(folder, device="cpu", dtype=dtype)
    before = {name: each.clone() for name, each in whole.state_dict().items()}
    add_lora(whole, LORA)
    layers = quantized_layers(module)
    assert len(layers) == 14 and len(adapted_layers(module)) == 12
    for (name, ours), (other, theirs) in zip(
        [*module.named_parameters(), *module.named_buffers()],
        [*whole.named_parameters(), *whole.named_buffers()],
        strict=True,
    ):
        assert name == other and ours.equal(theirs) and ours.requires_grad == theirs.requires_grad, name
    for name, layer in layers.items():
        codes, scales = quantize(before[name])
        assert layer.codes.equal(codes) and layer.scales.equal(scales), name
    kept = {name for name in before if name not in layers}
    assert any("lm_head" in name or "embed" in name for name in kept)
    assert all(plain_state(module)[name].value().equal(before[name]) for name in kept)
    assert saved_names(module) == {name for name, each in module.named_parameters() if each.requires_grad}


def test_codes_are_where_the_model_computes_although_parameters_rest_elsewhere(folder: Path) -> None:
    meta = meta_model("policy", folder, dtype=torch.float32)
    add_lora(meta.module, LORA)
    materialise(meta.module, torch.device("meta"), torch.device("cpu"))
    assert all(each.is_meta for each in meta.module.parameters())
    assert not any(each.is_meta for each in meta.module.buffers())


def test_stages_are_refused(folder: Path) -> None:
    model = {"path": str(folder), "device": "cpu"}
    layout = ParallelLayout.from_keys(2, pipeline=2)
    with pytest.raises(ModelError, match="nf4 with pipeline_parallel_size=2: each rank holds"):
        build_engine("policy", model, name="actor", optim=OptimConfig(), layout=layout, lora=LORA)


@pytest.mark.parametrize("recomputed", [False, True])
def test_gradients_are_those_over_the_dequantized_base(folder: Path, recomputed: bool) -> None:
    """Adapters in training: outputs, gradients and what an update makes of them, to the bit."""
    ours = build_policy(folder, device="cpu", gradient_checkpointing=recomputed)
    theirs = build_policy(folder, device="cpu", gradient_checkpointing=recomputed)
    add_lora(ours, LORA)
    plain = dequantized_state(ours)
    theirs.load_state_dict(plain)
    add_lora(theirs, replace(LORA, quantization=None))
    stir(ours)
    stir(theirs)
    found = []
    for policy in (ours, theirs):
        policy.train()
        out = policy(packed_rows(tiny_rows())).log_probs
        out.square().sum().backward()
        found.append(
            (out, {name: each.grad for name, each in policy.named_parameters() if each.requires_grad})
        )
    assert found[0][0].equal(found[1][0])
    assert found[0][1].keys() == found[1][1].keys() and len(found[0][1]) == 24
    for name, grad in found[0][1].items():
        assert grad is not None and float(grad.abs().sum()) > 0 and grad.equal(found[1][1][name]), name


@torch.no_grad()
def stir(policy: PolicyModel) -> None:
    for number, layer in enumerate(adapted_layers(policy).values()):
        b = layer.lora_B["default"].weight
        b.copy_(torch.rand(b.shape, generator=torch.Generator().manual_seed(number)) - 0.5)


def dequantized_state(policy: PolicyModel) -> dict[str, Tensor]:
    """The base as files would have it."""
    return {name: entry.value(folded=False).clone() for name, entry in plain_state(policy).items()}


def test_an_exported_folder_has_the_weights_that_were_computed_with(folder: Path, tmp_path: Path) -> None:
    policy = build(folder).policy
    stir(policy)
    rows = packed_rows(tiny_rows())
    with torch.no_grad():
        wanted = policy(rows).log_probs
        with adapters_off(policy):
            base = policy(rows).log_probs
    state = dequantized_state(policy)
    save_hf(policy, tmp_path / "out")
    read = PolicyModel(AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager"))
    with torch.no_grad():
        assert torch.allclose(read(rows).log_probs, wanted, atol=1e-4)
        read.load_state_dict(state)
        assert read(rows).log_probs.equal(base), "the reference is the dequantized base"
    fold_adapters(policy)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not quantized_layers(policy)
    assert all(again[name].equal(each) for name, each in policy.hf.state_dict().items())
    original = build_policy(folder, device="cpu")
    with torch.no_grad():
        assert float((original(rows).log_probs - base).abs().max()) > 1e-3, "rounding has moved something"


def test_its_bytes_are_those_of_the_plan(folder: Path) -> None:
    """Parameters and buffers of the module, which the plan also counts from config.json alone."""
    engine = build(folder, replace(LORA, exclude_modules=None))
    module = engine.policy
    layers = quantized_layers(module).values()
    largest = max(layer.in_features * layer.out_features for layer in layers)
    held = sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    model = ModelConfig(path=str(folder), lora_rank=4, quantization="nf4")
    lora = LoraSettings.from_config(model)
    counted = size_of("policy", model, dtype="float32", device=torch.device("cpu"), lora=lora)
    told = load_shape(str(folder)).size(lora_rank=4, itemsize=4, quantized=True)
    assert DEQUANTIZING_BYTES == 6
    for size in (counted, told):
        assert size.quantized == sum(layer.in_features * layer.out_features for layer in layers)
        assert size.largest_quantized in (largest, 2 * largest), "config.json tells no halves of an MLP"
        role = RoleEngine("actor", ParallelLayout(), engine.fsdp, model, True, 1, 8, 8)
        parts = {part.label: part.size for part in engine_needs(role, size, device="cpu").parts}
        assert parts["weights"] == pytest.approx(held + 6 * size.largest_quantized, rel=0.02)
    codes = sum(layer.codes.nbytes + layer.scales.nbytes for layer in layers)
    assert codes / (2 * counted.quantized) == pytest.approx(0.28125, rel=0.01), "of bfloat16"


@pytest.mark.parametrize(("kind", "what"), [("qwen3_moe", "has experts"), ("mixtral", "has experts")])
def test_what_a_base_in_4_bits_is_not_for(kind: str, what: str) -> None:
    with pytest.raises(ModelError, match=what):
        add_lora(PolicyModel(tiny_hf(kind)), LORA)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma2", "gpt_neox"])
def test_families_start_as_their_dequantized_base(kind: str) -> None:
    policy = PolicyModel(tiny_hf(kind))
    add_lora(policy, replace(LORA, exclude_modules=None))
    rows = packed_rows(tiny_rows())
    with torch.no_grad():
        before = policy(rows).log_probs
        other = PolicyModel(tiny_hf(kind))
        other.load_state_dict(dequantized_state(policy))
        assert other(rows).log_probs.equal(before)


@pytest.mark.parametrize("kind", ["value", "score"])
def test_critics_and_reward_models(kind: Literal["value", "score"], folder: Path, tmp_path: Path) -> None:
    """Read weight by weight they are those that are read whole; a reward model is written as it computes."""
    model = {"path": str(folder), "device": "cpu", "dtype": "float32", "probe": False}
    engine = build_engine(kind, model, name="learner", optim=OptimConfig(), lora=LORA)
    assert isinstance(engine, FSDPEngine)
    whole = build_score(kind, folder, device="cpu", dtype="float32", probe=False)
    add_lora(whole, LORA)
    ours = dict([*engine.module.named_parameters(), *engine.module.named_buffers()])
    theirs = dict([*whole.named_parameters(), *whole.named_buffers()])
    assert ours.keys() == theirs.keys() and len(quantized_layers(engine.module)) == 14
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert saved_names(engine.module) == {name for name, each in ours.items() if each.requires_grad}
    if kind == "score":
        engine.export_hf(tmp_path / "out")
        read = load_saved(tmp_path / "out").state_dict()
        for name, layer in quantized_layers(engine.module).items():
            assert read[name.replace("backbone", "model")].equal(layer.weight), name
