"""Weights in fewer bits against slow products in float64, and a policy's copy that multiplies by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo import SPARSE, VOCABULARY, tiny_hf

from hybridflow.config.engine_features import NATIVE_KINDS
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, add_lora
from hybridflow.models.copies import quantized_weights
from hybridflow.models.copies.quantized_copy import QuantizedCopy, _put
from hybridflow.models.copies.quantized_weights import FEW_ROWS, KINDS, check_kind
from hybridflow.models.experts.layers import expert_modules
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import PackedBatch, make_rows, pack

CPU = torch.device("cpu")
SIZES = {"intermediate_size": 64, "moe_intermediate_size": 32}
WHOLE = ("embed", "lm_head", "norm", "bias", "mlp.gate.", "shared_expert_gate")
"""Parts of the names of weights that keep their precision."""
LORA = LoraSettings(rank=2, seed=3)


def test_the_checks_know_the_kinds() -> None:
    assert tuple(KINDS) == NATIVE_KINDS


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def slow_weight(kind: str, weight: Tensor) -> Tensor:
    """The weight [N, K] as a kind rounds it, in float64, number by number."""
    rounded = weight.double().clone()
    if kind == "float16":
        return rounded.half().double()
    largest = {"int8": 127.0, "fp8": 448.0}[kind]
    for row in rounded:
        scale = max(abs(float(value)) for value in row) / largest
        for place, value in enumerate(row.tolist()):
            number = float(value) / scale
            if kind == "int8":
                row[place] = scale * round(number)
            else:
                row[place] = scale * float(torch.tensor(number).to(torch.float8_e4m3fn))
    return rounded


def slow_inputs(kind: str, inputs: Tensor) -> Tensor:
    """Inputs [R, K] as a kind rounds them on a CPU, in float64."""
    if kind == "float16":
        return inputs.double()
    if kind == "int8":
        return inputs.bfloat16().double()
    scales = inputs.double().abs().amax(1, keepdim=True) / 448.0
    return (inputs.double() / scales).float().to(torch.float8_e4m3fn).double() * scales


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1, 70])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_rounded_numbers(kind: str, rows: int) -> None:
    weight = draw(48, 32)
    weight[5] *= 1e-3  # each output has a scale of its own
    inputs = draw(rows, 32, seed=1)
    inputs[0, 3] = 40.0
    copy = KINDS[kind]()
    copy.fill(weight)
    wanted = slow_inputs(kind, inputs) @ slow_weight(kind, weight).T
    # a sum is rounded to bfloat16, but for float16 weights
    bound = {"int8": 2.0**-8, "fp8": 2.0**-8, "float16": 1e-5}[kind]
    found = copy.times(inputs)
    assert found.dtype == torch.float32
    assert ((found - wanted).abs() <= bound * wanted.abs() + 1e-5).all()
    assert ((found - inputs @ weight.T).abs() > 0).any(), "nothing was rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_product_in_any_company(kind: str) -> None:
    copy = KINDS[kind]()
    copy.fill(draw(64, 48))
    inputs = draw(80, 48, seed=2)
    together = copy.times(inputs)
    alone = torch.cat([copy.times(row[None]) for row in inputs])
    # the order of a sum may turn the last bit of bfloat16, in a few of them
    assert (together - alone).abs().max() <= 2.0**-7 * together.abs().max()
    assert ((together - alone).abs() > 1e-5).float().mean() < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dtypes_shapes_and_bias(kind: str, dtype: torch.dtype) -> None:
    weight, bias = draw(32, 16).to(dtype), draw(32).to(dtype)
    copy = KINDS[kind]()
    copy.fill(weight)
    inputs = draw(2, 3, 16, seed=3).to(dtype)
    found = copy.linear(inputs, bias)
    assert found.dtype == dtype and found.shape == (2, 3, 32)
    flat = copy.times(inputs.view(6, 16)).view(2, 3, 32)
    torch.testing.assert_close(found, flat + bias)
    torch.testing.assert_close(copy.linear(inputs, None), flat)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [3, FEW_ROWS + 1])
def test_inputs_may_lie_in_memory_in_any_order(kind: str, rows: int) -> None:
    copy = KINDS[kind]()
    copy.fill(draw(32, 16))
    for inputs in (draw(16, rows).T, draw(rows, 48, seed=1)[:, 8:24], draw(1, 16).expand(rows, 16)):
        assert torch.equal(copy.linear(inputs, None), copy.times(inputs.contiguous()))


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_copy_stays_where_it_is_until_it_is_freed(kind: str) -> None:
    copy = KINDS[kind]()
    assert isinstance(copy, quantized_weights._Scaled) and copy.nbytes == 0
    copy.fill(draw(32, 16))
    places = copy.numbers.data_ptr(), copy.scales.data_ptr()
    assert copy.nbytes == 32 * 16 + 32 * 4
    copy.fill(2 * draw(32, 16))
    assert (copy.numbers.data_ptr(), copy.scales.data_ptr()) == places
    twice = copy.times(draw(3, 16, seed=1))
    copy.free()
    assert copy.nbytes == 0
    copy.fill(draw(32, 16))
    torch.testing.assert_close(2 * copy.times(draw(3, 16, seed=1)), twice)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_zeros_are_zeros_and_what_is_not_finite_shows(kind: str) -> None:
    weight = draw(32, 16)
    weight[0] = 0.0
    weight[1, 2] = float("nan")
    copy = KINDS[kind]()
    copy.fill(weight)
    for rows in (2, FEW_ROWS + 2):
        product = copy.times(draw(rows, 16, seed=4))
        assert (product[:, 0] == 0).all() and product[:, 1].isnan().all() and product[:, 2:].isfinite().all()
        assert (copy.times(torch.zeros(rows, 16))[:, 2:] == 0).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -70000.0])
def test_float16_refuses_weights_that_it_has_no_number_for(value: float) -> None:
    weight = draw(32, 16)
    weight[1, 2] = value
    with pytest.raises(ModelError, match=r"beyond ±65504, or no number; round to int8"):
        KINDS["float16"]().fill(weight)


def test_int8_on_a_gpu_does_not_overflow_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = KINDS["int8"]()
    copy.fill(torch.full((32, 64), 0.5))
    inputs = torch.full((3, 64), 20.0, dtype=torch.float16)
    monkeypatch.setattr(Tensor, "device", torch.device("cuda"))  # its way works on a CPU too
    assert ((copy.times(inputs) - 640).abs() <= 4).all()  # 127 · 20 · 64 before the scale


def test_what_cannot_be_multiplied_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"quantization=int4: .* rounds to int8, fp8, float16"):
        check_kind("int4", CPU)
    with pytest.raises(ConfigError, match="float16 is for CPUs, and this is cuda"):
        check_kind("float16", torch.device("cuda"))

    def without(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("torch._scaled_mm needs compute capability 8.9")

    monkeypatch.setattr(torch, "_scaled_mm", without)
    with pytest.raises(ConfigError, match=r"fp8 does not work on cpu .*8\.9; set it to int8, or leave"):
        check_kind("fp8", CPU)
    assert check_kind("int8", CPU) is KINDS["int8"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_weight_int8pack_mm", without)
        with pytest.raises(ConfigError, match=r"int8 does not work on cpu .*8\.9; leave it out"):
            check_kind("int8", CPU)
    monkeypatch.setattr(quantized_weights, "linear", lambda inputs, weight: 2 * inputs @ weight.T)
    with pytest.raises(ConfigError, match="gives wrong products"):
        check_kind("int8", CPU)


def packed() -> PackedBatch:
    numbers = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, VOCABULARY, (length,), generator=numbers).tolist() for length in (7, 3, 20)]
    return pack(
        DataProto.from_dict(make_rows([row[:2] for row in rows], [row[2:] for row in rows], pad_id=0))
    )


def log_probs(policy: PolicyModel) -> Tensor:
    with torch.no_grad():
        return policy(packed()).log_probs


@torch.no_grad()
def slowly(policy: PolicyModel, kind: str) -> Tensor:
    """Log-probs of the policy itself, after each of its weights has been rounded in place."""
    kept = {name: weight.clone() for name, weight in policy.named_parameters()}

    def rounds_inputs(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (slow_inputs(kind, inputs[0]).float(),)

    def rounds_sums(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output if kind == "float16" else output.bfloat16().float()

    experts = {f"hf.{path}" for path in expert_modules(policy.hf)}
    handles = []
    for path, module in policy.named_modules():
        linear = type(module) is nn.Linear and module is not policy.head and ".lora_" not in path
        if linear and all(size % 16 == 0 for size in module.weight.shape):
            module.weight.copy_(slow_weight(kind, module.weight))
            handles.append(
                module.register_forward_pre_hook(
                    lambda _, args: (slow_inputs(kind, args[0][0])[None].float(),)
                )
            )
        if path in experts:
            for name in ("gate_up_proj", "down_proj"):
                for weight in getattr(module, name):
                    own = weight.T if module.is_transposed else weight
                    own.copy_(slow_weight(kind, own))
    found = log_probs(policy)
    for handle in handles:
        handle.remove()
    for name, weight in policy.named_parameters():
        weight.copy_(kept[name])
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "phi3", *SPARSE])
def test_a_copy_of_a_policy_is_the_policy_with_rounded_weights(family: str) -> None:
    policy = PolicyModel(tiny_hf(family, **SIZES))
    whole = log_probs(policy)
    # inputs of experts are not rounded in `slowly`, and then a router may choose otherwise
    for kind, bound in (("float16", 2e-5), ("int8", 0.02))[: 1 if family in SPARSE else 2]:
        quantized = QuantizedCopy(policy, kind)
        quantized.refresh()
        found = log_probs(quantized.policy)
        apart = (found - slowly(policy, kind)).abs().median()
        assert apart < bound and 2 * apart < (found - whole).abs().median()
        assert torch.equal(log_probs(policy), whole), "the policy itself is as it was"
        if family in SPARSE:
            stacked = [name for name in quantized.names if ".experts." in name]
            assert len(stacked) == 2 * len(expert_modules(policy.hf)) > 0


def test_what_is_rounded_and_what_is_shared() -> None:
    policy = PolicyModel(tiny_hf("qwen2_moe", **SIZES, shared_expert_intermediate_size=32))
    quantized = QuantizedCopy(policy, "int8")
    quantized.refresh()
    own = dict(quantized.policy.named_parameters())
    for name, weight in policy.named_parameters():
        kept = any(
            part in name for part in ("embed", "lm_head", "norm", "bias", "mlp.gate.", "shared_expert_gate")
        )
        assert (own[name].numel() == 0) == (name in quantized.names) == (not kept), name
        assert not kept or own[name].data_ptr() == weight.data_ptr()
    rounded = sum(weight.numel() for name, weight in policy.named_parameters() if name in quantized.names)
    assert rounded < quantized.nbytes < 1.4 * rounded
    before = log_probs(quantized.policy)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.1)
    assert not torch.equal(log_probs(quantized.policy), before), "what is shared has changed at once"
    quantized.refresh()
    fresh = QuantizedCopy(policy, "int8")
    fresh.refresh()
    assert torch.equal(log_probs(quantized.policy), log_probs(fresh.policy))
    quantized.free()
    assert quantized.nbytes == 0 and all(weight.numel() == 0 for weight in quantized.policy.parameters())
    assert all(weight.numel() for weight in policy.parameters())


def test_routers_that_are_linear_layers_keep_their_precision() -> None:
    sizes = {"num_experts": 16, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}
    policy = PolicyModel(tiny_hf("afmoe", **SIZES, **sizes))
    quantized = QuantizedCopy(policy, "int8")
    assert "hf.model.layers.1.mlp.router.gate.weight" in dict(policy.named_parameters())
    assert not [name for name in quantized.names if "router" in name]
    assert any("layers.1.mlp" in name for name in quantized.names)


def test_weights_from_another_device_stay_where_they_were_put() -> None:
    own = nn.Parameter(torch.empty(0), requires_grad=False)
    first, second = draw(4, 3), draw(4, 3, seed=1)
    _put(own, first, shares=False)
    place = own.data_ptr()
    _put(own, second, shares=False)
    assert torch.equal(own, second) and own.data_ptr() == place not in (first.data_ptr(), second.data_ptr())
    _put(own, first, shares=True)
    assert own.data_ptr() == first.data_ptr()


def test_adapters_keep_their_precision() -> None:
    policy = PolicyModel(tiny_hf("llama", **SIZES))
    add_lora(policy, LORA)
    with torch.no_grad():
        for layer in adapted_layers(policy).values():
            layer.lora_B["default"].weight.fill_(0.5)
    quantized = QuantizedCopy(policy, "int8", lora=LORA)
    quantized.refresh()
    assert all("base_layer.weight" in name for name in quantized.names)
    with_adapters = log_probs(quantized.policy)
    assert (with_adapters - log_probs(policy)).abs().median() < 0.05
    with torch.no_grad():
        for layer in adapted_layers(policy).values():
            layer.lora_B["default"].weight.zero_()
    assert (log_probs(quantized.policy) - with_adapters).abs().max() > 0.5


def test_a_model_without_anything_to_round_is_refused() -> None:
    policy = PolicyModel(tiny_hf("llama", hidden_size=24, num_attention_heads=3, num_key_value_heads=3))
    with pytest.raises(ModelError, match="multiples of 16, so nothing of it can be rounded"):
        QuantizedCopy(policy, "int8")
