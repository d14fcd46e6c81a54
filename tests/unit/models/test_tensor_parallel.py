"""Models whose layers are cut among ranks: the same outputs and the same gradients on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from zoo import packed_rows, tiny_hf, tiny_rows

from hybridflow.errors import ModelError
from hybridflow.models.files.build import enable_gradient_checkpointing
from hybridflow.models.parallel.expert_parallel import apply_expert_parallel
from hybridflow.models.parallel.tensor_parallel import apply_tensor_parallel, tensor_slices, tensor_styles
from hybridflow.models.policy import PolicyModel
from hybridflow.models.value import ValueModel
from ranks import Ranks

BIASED = {"attention_bias": True, "mlp_bias": True}


def _gradients(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Outputs [M], and the gradients of a loss of them, whole."""
    outputs = model(packed_rows(tiny_rows()))
    values = outputs if isinstance(outputs, Tensor) else outputs.log_probs
    (torch.linspace(-1, 2, len(values), dtype=values.dtype) * values + 0.3 * values.square()).sum().backward()
    grads = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return values.detach(), {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()
    }


def _build(
    kind: str, model_type: str, changes: dict[str, Any], dtype: torch.dtype
) -> PolicyModel | ValueModel:
    model = (PolicyModel if kind == "policy" else ValueModel)(tiny_hf(model_type, dtype, **changes)).train()
    if isinstance(model, ValueModel):
        nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(3))
    return model


def _blocks(model: PolicyModel | ValueModel) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _cut(
    model: PolicyModel | ValueModel,
    mesh: DeviceMesh,
    *,
    shard: bool,
    meta: bool,
    experts: bool,
    slices: bool,
) -> None:
    """Tensor parallel where `slices` says so, and FSDP on the other dimension; `meta`: first placements, then
    weights.
    """
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    buffers = {name: tensor.clone() for name, tensor in model.named_buffers()}
    if meta:
        model.to("meta")
        if isinstance(model, PolicyModel):
            model.hf.tie_weights()
    if slices:
        apply_tensor_parallel(model, mesh["tensor"], but_experts=experts)
    if experts:
        apply_expert_parallel(model, mesh["tensor"], mesh["tensor"].get_group() if slices else None)
    if shard:
        for block in _blocks(model):
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    if not meta:
        return
    model.to_empty(device="cpu")
    for name, tensor in model.named_buffers():
        tensor.copy_(buffers[name])
    for name, parameter in model.named_parameters():
        source = whole[name]
        if isinstance(parameter, DTensor):
            parameter.data.copy_(distribute_tensor(source, parameter.device_mesh, parameter.placements))
        else:
            parameter.data.copy_(source)


def cut_against_whole(
    rank: int,
    kind: str,
    model_type: str,
    changes: dict[str, Any],
    dtype: torch.dtype,
    options: dict[str, Any],
) -> tuple[float, float, float, int]:
    """Largest differences of outputs, of gradients, and between ranks; the number of gradients."""
    wanted, wanted_grads = _gradients(_build(kind, model_type, changes, dtype))
    model = _build(kind, model_type, changes, dtype)
    if options.get("checkpointing"):
        assert isinstance(model, PolicyModel)
        enable_gradient_checkpointing(model.hf)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("shard", "tensor"))
    slices = options.get("slices", True)
    _cut(
        model,
        mesh,
        slices=slices,
        **{name: options.get(name, False) for name in ("shard", "meta", "experts")},
    )
    got, grads = _gradients(model)
    if not slices:  # both ranks have sent the same rows to the experts
        grads = {
            name: grad / 2 if ".experts." in name and not name.endswith("router.weight") else grad
            for name, grad in grads.items()
        }
    assert grads.keys() == wanted_grads.keys()
    between = 0.0
    for grad in grads.values():
        other = grad.clone()
        dist.broadcast(other, 0)
        between = max(between, float((other - grad).abs().max()))
    scale = max(float(grad.abs().max()) for grad in wanted_grads.values())
    apart = max(float((grads[name] - wanted_grads[name]).abs().max()) for name in grads) / scale
    return float((got - wanted).abs().max()), apart, between, len(grads)


def _check(
    ranks: Ranks, model_type: str, changes: dict[str, Any] | None = None, kind: str = "policy", **options: Any
) -> None:
    dtype = options.pop("dtype", torch.float64)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for apart, grads_apart, between, count in ranks.run(
        cut_against_whole, kind, model_type, changes or {}, dtype, options
    ):
        assert apart < tolerance and grads_apart < tolerance and between == 0.0 and count > 10


@pytest.mark.parametrize(
    "model_type", ["llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "cohere", "gpt_neox"]
)
def test_architectures(two_ranks: Ranks, model_type: str) -> None:
    """Among them biases, norms of heads, tied embeddings, fused projections, soft-caps and windows."""
    _check(two_ranks, model_type)


@pytest.mark.parametrize(
    "model_type", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "olmoe"]
)
def test_experts_are_shared_by_the_same_ranks(two_ranks: Ranks, model_type: str) -> None:
    """Attention, dense layers and shared experts are cut; each rank computes routed experts of its tokens."""
    _check(two_ranks, model_type, experts=True, meta=True)


def test_biases_after_the_sum(two_ranks: Ranks) -> None:
    _check(two_ranks, "llama", BIASED)


def test_values(two_ranks: Ranks) -> None:
    _check(two_ranks, "qwen2", kind="value")


def test_float32(two_ranks: Ranks) -> None:
    _check(two_ranks, "gemma", {"initializer_range": 0.1}, dtype=torch.float32)


def test_checkpointing(two_ranks: Ranks) -> None:
    _check(two_ranks, "qwen3", checkpointing=True)


@pytest.mark.parametrize("meta", [False, True])
def test_sharded_on_the_other_dimension(two_ranks: Ranks, meta: bool) -> None:
    _check(two_ranks, "llama", BIASED, shard=True, meta=meta)
    _check(two_ranks, "qwen3", {"tie_word_embeddings": True}, shard=True, meta=meta, checkpointing=True)


def collectives(rank: int, model_type: str) -> tuple[int, int]:
    model = _build("policy", model_type, {}, torch.float32)
    apply_tensor_parallel(model, init_device_mesh("cpu", (2,)))
    with CommDebugMode() as forward:
        log_probs = model(packed_rows(tiny_rows())).log_probs
    with CommDebugMode() as backward:
        log_probs.sum().backward()
    return forward.get_total_counts(), backward.get_total_counts()


def test_two_sums_a_block_each_way(two_ranks: Ranks) -> None:
    """After attention and after the MLP, and before each in the backward pass: not one for each layer."""
    assert two_ranks.run(collectives, "llama") == [(4, 4), (4, 4)]
    # and one for each norm of heads, of one head's size
    assert two_ranks.run(collectives, "qwen3") == [(4, 8), (4, 8)]


def own_sizes(rank: int) -> dict[str, tuple[int, ...]]:
    hf = tiny_hf("llama", **BIASED)
    apply_tensor_parallel(PolicyModel(hf), init_device_mesh("cpu", (2,)))
    return {
        name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
        for name, p in hf.named_parameters()
    }


def test_slices_tell_what_is_cut(two_ranks: Ranks) -> None:
    hf = tiny_hf("llama", **BIASED)
    slices = tensor_slices(hf)
    assert slices["model.layers.1.self_attn.k_proj.bias"] == 0
    assert slices["model.layers.0.mlp.down_proj.weight"] == 1
    assert len(slices) == 2 * (5 * 2 + 2)
    for name, shape in two_ranks.run(own_sizes)[1].items():
        wanted = list(hf.get_parameter(name).shape)
        if name in slices:
            wanted[slices[name]] //= 2
        assert shape == tuple(wanted), name


def test_slices_of_a_backbone_and_of_a_model() -> None:
    hf = tiny_hf("qwen3")
    assert {f"model.{name}": dim for name, dim in tensor_slices(hf.model).items()} == tensor_slices(hf)
    assert tensor_styles(hf)["model.layers.0.self_attn.q_norm"] == "partial_norm"
    assert tensor_styles(tiny_hf("phi3"))["model.layers.0.self_attn.o_proj"] == "rowwise_split"


@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_experts_are_refused(model_type: str) -> None:
    with pytest.raises(ModelError, match=rf"{model_type}.*cannot be cut.*fsdp_config.tensor_parallel_size=1"):
        tensor_slices(tiny_hf(model_type))


def test_parameters_that_the_plan_forgets_are_refused() -> None:
    with pytest.raises(ModelError, match=r"does not name layers.0.self_attn.[qk]_norm.weight"):
        tensor_slices(tiny_hf("cohere", use_qk_norm=True))


def sizes_that_do_not_divide(rank: int, changes: dict[str, int]) -> str:
    model = PolicyModel(tiny_hf("llama", **changes))
    with pytest.raises(ModelError) as caught:
        apply_tensor_parallel(model, init_device_mesh("cpu", (2,)))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters()), (
        "refused before anything is cut"
    )
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads=1"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
            "num_attention_heads=3, num_key_value_heads=3",
        ),
        ({"intermediate_size": 45}, "intermediate_size=45"),
    ],
)
def test_sizes_that_do_not_divide_are_named(two_ranks: Ranks, changes: dict[str, int], said: str) -> None:
    for text in two_ranks.run(sizes_that_do_not_divide, changes):
        assert (
            f"fsdp_config.tensor_parallel_size=2 does not divide {said} of this 'llama' model; set it to 1"
            in text
        )
