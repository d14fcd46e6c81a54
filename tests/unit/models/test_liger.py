"""`use_liger`: which model gets other kernels, and where it is refused, with a stand-in package."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from zoo import tiny_hf

from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.copies.twin import Twin
from hybridflow.models.files.probe import probe_log_probs
from hybridflow.models.flat_decoder import FlatDecoder
from hybridflow.models.liger import check_liger, has_liger, patch_liger, use_liger_kernels
from hybridflow.models.policy import PolicyModel

CPU = torch.device("cpu")
NAMES = ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")


def gated(self: Any, states: Tensor) -> Tensor:
    """What the stand-in puts in the place of an MLP's forward; SCALE makes it wrong."""
    product: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(states)) * self.up_proj(states))
    return product * SCALE["mlp"]


SCALE = {"mlp": 1.0}
gated.__module__ = "liger_kernel.transformers.swiglu"


def never(*args: Any) -> Any:
    raise AssertionError("a kernel for CUDA was called on a CPU")


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package `liger_kernel` that patches as the real one does: instance and names of the module."""
    asked: dict[str, Any] = {}

    def apply(model: PreTrainedModel, **options: Any) -> None:
        asked.update(options)
        for name in NAMES:
            setattr(modeling_llama, name, never if name.startswith("apply") else type(name, (), {}))
        for layer in model.base_model.layers:
            layer.mlp.forward = MethodType(gated, layer.mlp)

    parts = {
        name: ModuleType(name)
        for name in ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.monkey_patch")
    }
    patch: Any = parts["liger_kernel.transformers.monkey_patch"]
    patch.MODEL_TYPE_TO_APPLY_LIGER_FN, patch._apply_liger_kernel_to_instance = {"llama": apply}, apply
    for name, part in parts.items():
        part.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, part)
    for name in NAMES:
        monkeypatch.setattr(modeling_llama, name, getattr(modeling_llama, name))
    monkeypatch.setitem(SCALE, "mlp", 1.0)
    return asked


def test_a_model_is_patched_and_no_other(package: dict[str, Any]) -> None:
    plain = PolicyModel(tiny_hf("llama"))
    before, classes = probe_log_probs(plain), [getattr(modeling_llama, name) for name in NAMES[1:]]
    policy = PolicyModel(tiny_hf("llama"))
    use_liger_kernels(policy)
    assert package == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert has_liger(policy) and not has_liger(plain)
    assert [getattr(modeling_llama, name) for name in NAMES[1:]] == classes
    assert torch.equal(probe_log_probs(plain), before)
    assert torch.allclose(probe_log_probs(policy), before, atol=1e-5)


def test_rotary_positions_are_patched_once_however_many_models_there_are() -> None:
    plain: Callable[..., Any] = modeling_llama.apply_rotary_pos_emb
    for _ in range(3):
        patch_liger(tiny_hf("llama"))
    assert modeling_llama.apply_rotary_pos_emb.without_liger is plain


def test_a_patched_model_is_not_decoded_without_its_patches() -> None:
    policy = PolicyModel(tiny_hf("llama"))
    scores = dict.fromkeys(range(policy.config.num_hidden_layers), Any)
    assert FlatDecoder.of(policy.hf.base_model, scores) is not None
    patch_liger(policy.hf)
    assert FlatDecoder.of(policy.hf.base_model, scores) is None


def test_the_twin_that_generates_computes_alike() -> None:
    policy = PolicyModel(tiny_hf("llama"))
    patch_liger(policy.hf)
    twin = Twin(
        policy, dtypes={name: parameter.dtype for name, parameter in policy.named_parameters()}, device=CPU
    )
    assert has_liger(twin.policy)


def test_kernels_that_compute_something_else_are_refused() -> None:
    SCALE["mlp"] = 3.0
    with pytest.raises(ModelError, match=r"with Liger's kernels its log-probs differ by .* nats"):
        use_liger_kernels(PolicyModel(tiny_hf("llama")))
    with pytest.raises(ModelError, match="Liger has no kernels for model_type 'qwen2'"):
        patch_liger(tiny_hf("qwen2"))


def test_where_it_cannot_run_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match="a model on cpu: Liger's kernels are Triton programs, which run on CUDA only"
    ):
        check_liger(CPU)
    check_liger(torch.device("cuda"))
    monkeypatch.delitem(sys.modules, "liger_kernel")
    with pytest.raises(
        ConfigError, match="needs liger-kernel, which is not installed: install the extra 'liger'"
    ):
        check_liger(torch.device("cuda"))
