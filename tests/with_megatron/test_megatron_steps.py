"""megatron-core against PyTorch's own engine: losses, norms, weights and moments, checkpoints, exports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import training_rows
from megatron_runs import FAMILIES, Setting, padding, read_and_export, resume, save, save_model, train
from safetensors.torch import load_file
from transformers import AutoModelForTokenClassification

from hybridflow.distributed.layout import ParallelLayout
from hybridflow.errors import ModelError
from ranks import Ranks

TENSOR = {"tensor": 2}
STAGES = {"pipeline": 2}
PARTS = {"pipeline": 2, "parts": 2}
EXPERTS = {"experts": 2}
BOTH = {"tensor": 2, "pipeline": 2}
SHARED = {"sequence": 2}


@contextmanager
def fresh(ranks: Ranks) -> Iterator[None]:
    """Ranks without megatron-core's groups: it has one layout in a process."""
    ranks.stop()
    yield
    ranks.stop()


def test_the_padding_is_a_token_of_the_rows() -> None:
    rows = training_rows()
    assert (rows.batch["input_ids"][rows.batch["attention_mask"].bool()] == padding()).any()


def test_layers_that_the_parts_of_stages_cannot_share() -> None:
    from hybridflow.engines.megatron.network import check_family

    config = FAMILIES["four layers"]()
    layout = ParallelLayout.from_keys(2, pipeline=2)
    check_family(config, layout, 2)
    config.num_hidden_layers = 6
    said = "pipeline_parallel_size=2 × virtual_pipeline_parallel_size=2 does not divide its 6 layers"
    with pytest.raises(ModelError, match=said):
        check_family(config, layout, 2)


def assert_same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Hold what all ranks of one engine have seen against what those of another have."""
    sums = [
        [sum(numbers) for numbers in zip(*(each["losses"] for each in side if each["returns"]), strict=True)]
        for side in (ours, theirs)
    ]
    assert sums[0] == pytest.approx(sums[1], abs=1e-5)
    norms = [next(each["norms"] for each in side if each["norms"]) for side in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    for kind in ("weights", "moments"):
        left: dict[str, Any] = {}
        right: dict[str, Any] = {}
        for each in ours:
            left |= each[kind]
        for each in theirs:
            right |= each[kind]
        assert left.keys() == right.keys()
        for name, wanted in right.items():
            pairs = [(left[name], wanted)]
            if kind == "moments":
                assert left[name].keys() == wanted.keys()
                pairs = [(left[name][part], wanted[part]) for part in wanted]
            for got, want in pairs:
                assert torch.allclose(got, want, rtol=1e-3, atol=1e-5 * float(want.abs().max())), name
    left_rows, right_rows = ([each for each in side if each["returns"]] for side in (ours, theirs))
    if len(left_rows) == len(right_rows):  # the same rows on each
        for one, other in zip(left_rows, right_rows, strict=True):
            for when in ("before", "after"):
                for name, want in other[when].items():
                    assert torch.allclose(one[when][name], want, atol=1e-5), (when, name)


@pytest.mark.parametrize(
    ("family", "sizes", "recompute"),
    [
        ("llama", TENSOR, False),
        ("odd vocabulary", TENSOR, True),
        ("llama", STAGES, True),
        ("qwen2", STAGES, False),
        ("qwen2", TENSOR, False),
        ("four layers", PARTS, True),
        ("four layers of experts", PARTS, False),
        ("llama3 rope", {}, False),
        ("qwen3_moe", EXPERTS, False),
        ("qwen3_moe, raw", EXPERTS, True),
        ("mixtral", EXPERTS, False),
        ("odd vocabulary", SHARED, False),
        ("qwen3_moe", SHARED, True),
        ("qwen3_moe", TENSOR, True),
        ("qwen3_moe, raw", TENSOR | EXPERTS, False),
        ("mixtral", TENSOR, False),
    ],
)
def test_five_steps_on_two_ranks(
    two_ranks: Ranks, tmp_path: Path, family: str, sizes: dict[str, int], recompute: bool
) -> None:
    setting = Setting(save_model(tmp_path, family), sizes=sizes, recompute=recompute)
    other = {} if sizes != EXPERTS else EXPERTS
    with fresh(two_ranks):
        assert_same(
            two_ranks.run(train, setting),
            two_ranks.run(train, replace(setting, strategy="fsdp2", sizes=other)),
        )


def test_five_steps_in_a_ring(two_ranks: Ranks, tmp_path: Path) -> None:
    setting = Setting(save_model(tmp_path, "llama3 rope"), sizes=SHARED, recompute=True, context="ring")
    with fresh(two_ranks):
        assert_same(two_ranks.run(train, setting), two_ranks.run(train, replace(setting, strategy="fsdp2")))


@pytest.mark.parametrize(
    ("family", "sizes", "recompute"),
    [
        ("llama", TENSOR, False),
        ("qwen2", STAGES, True),
        ("four layers", PARTS, False),
        ("qwen3", SHARED, False),
        ("mixtral", EXPERTS, False),
        ("mixtral", TENSOR | EXPERTS, True),
    ],
)
def test_a_value_model(
    two_ranks: Ranks, tmp_path: Path, family: str, sizes: dict[str, int], recompute: bool
) -> None:
    """Its head starts at zero; it goes on in the other engine, and comes back."""
    folder = save_model(tmp_path / "model", family)
    there = Setting(folder, sizes=sizes, recompute=recompute, kind="value")
    here = replace(there, strategy="fsdp2", sizes={})
    with fresh(two_ranks):
        went_on = two_ranks.run(save, there, str(tmp_path / "megatron"))
        assert_same(went_on, two_ranks.run(save, here, str(tmp_path / "torch")))
        assert_same(two_ranks.run(resume, here, str(tmp_path / "megatron")), went_on)
        assert_same(two_ranks.run(resume, there, str(tmp_path / "torch")), went_on)


def test_a_head_of_float32_beside_bfloat16(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen2", AutoModelForTokenClassification)
    setting = Setting(folder, kind="value", dtype="bfloat16")
    with fresh(two_ranks):
        went_on = two_ranks.run(save, setting, str(tmp_path / "state"))
        resumed = two_ranks.run(resume, setting, str(tmp_path / "state"))
        other = two_ranks.run(resume, replace(setting, strategy="fsdp2"), str(tmp_path / "state"))
    for each, again in zip(went_on, resumed, strict=True):
        assert each["losses"] == again["losses"]
        for name, entry in each["moments"].items():
            assert ("master" in entry) == (not name.startswith("head."))
            assert all(torch.equal(entry[kind], again["moments"][name][kind]) for kind in entry)
    assert other[0]["losses"] == pytest.approx(went_on[0]["losses"], rel=0.05)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3", BOTH),
        ("llama", TENSOR),
        ("mixtral", EXPERTS),
        ("odd vocabulary", SHARED | TENSOR),
        ("llama", SHARED | STAGES),
        ("four layers of experts", PARTS | EXPERTS),
        ("four layers of experts", PARTS | TENSOR | EXPERTS),
        ("qwen3_moe", SHARED | EXPERTS),
        ("qwen3_moe", BOTH),
        ("mixtral", TENSOR | {"experts": 4}),
        ("qwen3_moe, raw", SHARED | TENSOR | EXPERTS),
    ],
)
def test_five_steps_on_four_ranks(
    four_ranks: Ranks, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    setting = Setting(save_model(tmp_path, family), sizes=sizes)
    with fresh(four_ranks):
        assert_same(
            four_ranks.run(train, setting),
            four_ranks.run(train, replace(setting, strategy="fsdp2", sizes={})),
        )


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("odd vocabulary", TENSOR),
        ("llama", STAGES),
        ("four layers", PARTS),
        ("qwen3_moe", EXPERTS),
        ("qwen2", SHARED),
        ("qwen3_moe", TENSOR),
        ("mixtral", TENSOR | EXPERTS),
    ],
)
def test_a_state_goes_there_and_back(
    two_ranks: Ranks, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    there = Setting(save_model(tmp_path / "model", family), sizes=sizes)
    here = replace(there, strategy="fsdp2", sizes={})
    with fresh(two_ranks):
        went_on = two_ranks.run(save, there, str(tmp_path / "megatron"))
        assert_same(two_ranks.run(resume, here, str(tmp_path / "megatron")), went_on)
        assert_same(two_ranks.run(resume, there, str(tmp_path / "megatron")), went_on)
        went_on = two_ranks.run(save, here, str(tmp_path / "torch"))
        assert_same(two_ranks.run(resume, there, str(tmp_path / "torch")), went_on)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("odd vocabulary", TENSOR),
        ("llama", STAGES),
        ("four layers", PARTS),
        ("qwen3_moe", EXPERTS),
        ("qwen3_moe", TENSOR | EXPERTS),
    ],
)
def test_weights_come_out_as_they_went_in(
    two_ranks: Ranks, tmp_path: Path, family: str, sizes: dict[str, int]
) -> None:
    folder = save_model(tmp_path / "model", family)
    setting = Setting(folder, sizes=sizes, optim=None)
    with fresh(two_ranks):
        found = two_ranks.run(read_and_export, setting, str(tmp_path / "export"))
    files = load_file(Path(folder) / "model.safetensors")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == files.keys()
    for name, wanted in files.items():
        assert torch.equal(exported[name], wanted), name
    for sent, parts in found:
        assert files.keys() <= sent.keys() and all(torch.equal(sent[name], files[name]) for name in files)
        assert parts
