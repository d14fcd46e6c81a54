"""`hybridflow.sft`, `dpo` and `reward_model`: the commands of the same names over rows of a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_calls import SFT_KEYS

import hybridflow

PAIRS = [
    {
        "prompt": f"{number} + 1 = ?",
        "chosen": str(number + 1),
        "rejected": str(number + 3),
    }
    for number in range(8)
]
TALKS = [
    {"messages": [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]}
    for _ in range(8)
]


@pytest.mark.slow
def test_each_kind_learns_and_gives_back_its_model(model: Path, tmp_path: Path) -> None:
    run = hybridflow.sft(
        model=model, dataset=TALKS, output_dir=tmp_path / "sft", overrides=SFT_KEYS, progress=False
    )
    assert "train/loss" in run.metrics[-1] and run.model()[0].config.hidden_size == 32
    run = hybridflow.dpo(
        model=model,
        dataset=PAIRS,
        output_dir=tmp_path / "dpo",
        overrides=SFT_KEYS,
        progress=False,
    )
    assert "train/loss" in run.metrics[-1] and run.model()[0].config.hidden_size == 32
    run = hybridflow.reward_model(
        model=model, dataset=PAIRS, output_dir=tmp_path / "reward", overrides=SFT_KEYS, progress=False
    )
    assert type(run.model()[0]).__name__ == "LlamaForSequenceClassification"
