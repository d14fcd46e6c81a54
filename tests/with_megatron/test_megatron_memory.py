"""The planner's bytes of megatron-core are those that the fullest rank holds."""

from __future__ import annotations

import pytest
import torch
from megatron_runs import Setting, build, go, save_model

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.models.files.size import size_of
from hybridflow.planner.memory import RoleEngine, engine_needs
from hybridflow.planner.model_shape import load_shape
from ranks import Ranks

LABELS = ("weights", "gradients", "float32 masters", "Adam moments")


def held(rank: int, setting: Setting) -> list[int]:
    """The bytes of a rank after a step."""
    from hybridflow.engines.megatron.optimizer import MOMENTS

    engine = build(setting)
    go(engine, 1)
    parameters = [each for part in engine.parts for each in part.parameters()]
    masters = engine.adamw._masters.items()
    states = [entry for part in engine.adamw._inners for entry in part.state.values()]
    return [
        sum(each.nbytes for each in parameters),
        sum(each.main_grad.nbytes for each in parameters),
        sum(master.nbytes for each, master in masters if each.dtype != torch.float32),
        sum(entry[name].nbytes for entry in states for name in MOMENTS),
    ]


@pytest.mark.parametrize(
    ("family", "sizes", "dtype"),
    [
        ("llama", {}, "bfloat16"),
        ("llama", {"tensor": 2}, "float32"),
        ("qwen2", {"pipeline": 2}, "bfloat16"),
        ("qwen3_moe", {"experts": 2}, "bfloat16"),
        ("qwen3", {"sequence": 2}, "float32"),
    ],
)
def test_two_ranks_hold_what_was_planned(
    two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, family: str, sizes: dict[str, int], dtype: str
) -> None:
    setting = Setting(save_model(tmp_path_factory.mktemp("model"), family), sizes=sizes, dtype=dtype)
    two_ranks.stop()  # megatron-core has one layout in a process
    found = [max(each) for each in zip(*two_ranks.run(held, setting), strict=True)]
    two_ranks.stop()
    layout = ParallelLayout.from_keys(2, **sizes)
    model = ModelConfig(path=setting.folder)
    counted = size_of(
        "policy",
        model,
        dtype=dtype,
        device=torch.device("cpu"),
        tensor=layout.tp,
        experts_apart=layout.ep > 1,
        blocks=True,
    )
    for size in (counted, load_shape(setting.folder).size(itemsize=counted.itemsize)):
        engine = RoleEngine("actor", layout, FSDPConfig(), model, True, 7, 16, 64, strategy="megatron")
        needs = engine_needs(engine, size, device="cpu")
        planned = {part.label: part.size for part in needs.parts}
        assert found == pytest.approx([planned.get(label, 0) for label in LABELS], rel=0.05)
        assert needs.between == sum(planned.get(label, 0) for label in LABELS)
