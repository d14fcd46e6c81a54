"""Learning from comparisons on two ranks, each with a part of the pairs, is that of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridflow.config import DPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.model import OptimConfig
from hybridflow.config.preference import PreferenceConfig
from hybridflow.data.preference import CHOSEN, REJECTED, Comparison
from hybridflow.data.sft import SFTRow
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits
from hybridflow.engines.build import build_engine
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.trainer.sft.kinds import kind_of
from ranks import Ranks

CONFIGS: dict[str, SFTConfig] = {
    "dpo": DPOConfig(),
    "kto": DPOConfig(algorithm=PreferenceConfig(loss="kto")),
    "bradley_terry": RewardModelConfig(),
}
PAIRS = 5


def pair(number: int) -> Comparison:
    answers = []
    for kind in (CHOSEN, REJECTED):
        length = 2 + (3 * number + kind) % 4
        ids = [5 + number, 6, 7, *(8 + (number * kind + place) % 9 for place in range(length))]
        answers.append(SFTRow(ids, [0] * 3 + [1] * length, number))
    return Comparison((answers[0], answers[1]), (CHOSEN, REJECTED), (-4.0 - number, -5.0))


def learn(rank: int, folder: str, name: str, world_size: int = 2) -> dict[str, Any]:
    """Two steps on the pairs of a rank; what was measured and the gradient's norm."""
    config = CONFIGS[name]
    kind = kind_of(config)
    torch.manual_seed(0)
    layout = ParallelLayout()
    if world_size > 1:
        layout = ParallelLayout.from_keys(world_size)
    engine = build_engine(
        kind.engine(config),
        {"path": folder, "device": torch.device("cpu"), "dtype": "float32", "probe": False},
        name="train",
        optim=OptimConfig(lr=3e-3, eps=1e-5),
        layout=layout,
    )
    worker: Any = kind.make_worker(config, engine, BatchLimits(40))
    rows = kind.make_rows([pair(number) for number in range(PAIRS)], 0)
    rows |= DataProto.from_dict({"reference_point": torch.full((len(rows),), 0.5)})
    count = len(rows) if name == "kto" else PAIRS
    mine = rows.select_idxs(((rows.batch["group_ids"] % world_size) == rank).nonzero().flatten())
    checksum = worker.checksum()
    found = [worker.update(mine, count=count).to_floats() for _ in range(2)]
    measures = worker.evaluate(mine)
    losses = measures._metrics["val/loss"]
    sums = {"loss": float(losses.value), "count": float(losses.denominator)}
    return sums | {"norms": [step.get("train/grad_norm") for step in found], "checksum": checksum}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_learn_what_one_does(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    folder = create_tiny_model(tmp_path / "m", hidden=32, layers=2, heads=2, kv_heads=1, intermediate=48)
    alone = learn(0, str(folder), name, 1)
    first, second = two_ranks.run(learn, str(folder), name)
    assert first["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    assert first["count"] + second["count"] == alone["count"]
    assert first["checksum"] == second["checksum"], "of the weights of both"
    assert first["loss"] + second["loss"] == pytest.approx(alone["loss"], rel=1e-5)
