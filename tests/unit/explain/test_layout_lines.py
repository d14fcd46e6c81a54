"""The layout that is drawn: each rank, what it holds, and which rows it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.errors import ModelError
from hybridflow.explain.run import MOST_RANKS, layout_lines
from hybridflow.models.tiny import create_tiny_model
from hybridflow.planner.memory import RoleEngine
from picture_models import create_tiny_vlm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    sizes = {"hidden": 32, "intermediate": 64, "heads": 2, "kv_heads": 1}
    return ModelConfig(path=str(create_tiny_model(tmp_path_factory.mktemp("models") / "tiny", **sizes)))


def drawn(layout: ParallelLayout, model: ModelConfig, fsdp: FSDPConfig | None = None) -> list[str]:
    engine = RoleEngine("actor", layout, fsdp or FSDPConfig(), model)
    return [": ".join(line) for line in layout_lines(engine, "actor")]


def test_stages_of_shards(model: ModelConfig) -> None:
    assert drawn(ParallelLayout(pp=2, dp_shard=2), model) == [
        "actor rank 0: stage 1 of 2, shard 1 of 2: rows of part 1 of 2; embeddings, layer 0",
        "actor rank 1: stage 1 of 2, shard 2 of 2: rows of part 2 of 2; embeddings, layer 0",
        "actor rank 2: stage 2 of 2, shard 1 of 2: rows of part 1 of 2; layer 1, last norm and head",
        "actor rank 3: stage 2 of 2, shard 2 of 2: rows of part 2 of 2; layer 1, last norm and head",
    ]


def test_megatron_core_gives_each_stage_as_many_layers(tmp_path: Path) -> None:
    sizes = {"hidden": 8, "intermediate": 8, "heads": 1, "kv_heads": 1, "layers": 8}
    model = ModelConfig(path=str(create_tiny_model(tmp_path / "deep", **sizes)))
    engine = RoleEngine("actor", ParallelLayout(pp=4), FSDPConfig(), model)
    ends = [
        line[-1].partition("; ")[2]
        for each in (engine, replace(engine, strategy="megatron"))
        for line in layout_lines(each, "actor")
    ]
    assert ends[3::4] == ["layer 7, last norm and head", "layers 6 to 7, last norm and head"]


def test_megatron_core_has_copies_where_fsdp_has_shards(model: ModelConfig) -> None:
    engine = RoleEngine("actor", ParallelLayout(dp_shard=2, tp=2), FSDPConfig(), model, strategy="megatron")
    places = [line.value for line in layout_lines(engine, "actor")]
    assert places[:2] == ["copy 1 of 2, slice 1 of 2", "copy 1 of 2, slice 2 of 2"]


def test_slices_share_rows_and_copies_do_not(model: ModelConfig) -> None:
    lines = drawn(ParallelLayout(dp_replicate=2, tp=2), model)
    assert lines[1] == "actor rank 1: copy 1 of 2, slice 2 of 2: rows of part 1 of 2"
    assert lines[2] == "actor rank 2: copy 2 of 2, slice 1 of 2: rows of part 2 of 2"


def test_experts_and_shared_tokens(model: ModelConfig) -> None:
    lines = drawn(ParallelLayout(dp_shard=4, ep=2, cp=2), model)
    assert lines[3].startswith(
        "actor rank 3: shard 4 of 4, experts 2 of 2: rows of part 2 of 2, every 2 ranks"
    )


def test_shards_alone_need_no_drawing_and_many_ranks_are_cut_short(model: ModelConfig) -> None:
    assert drawn(ParallelLayout(dp_shard=8), model) == []
    many = drawn(ParallelLayout(dp_shard=32, dp_replicate=2), model)
    assert len(many) == MOST_RANKS + 1 and many[-1].startswith("actor ranks 16 to 63: go on")


def test_a_model_that_cannot_be_cut_into_stages_is_named(tmp_path: Path) -> None:
    model = ModelConfig(path=str(create_tiny_vlm(tmp_path, hidden=16)))
    with pytest.raises(ModelError, match=r"Qwen3VLModel .*no plan of stages"):
        drawn(ParallelLayout(dp_shard=1, pp=2), model)
