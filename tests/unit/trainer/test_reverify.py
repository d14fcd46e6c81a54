"""`hybridflow reverify`: the run's own reward gives what is stored; others change it as they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.cli.main import main
from hybridflow.errors import ConfigError
from hybridflow.trainer.replay.kept_rows import KeptRows
from hybridflow.trainer.replay.reverify import reverify


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    keys = ("algorithm.adv_estimator=grpo", "trainer.keep_rows=true")
    with build(ppo_config(tiny_model(folder / "tiny"), folder / "run", *keys)) as trainer:
        trainer.fit()
    return folder / "run"


def test_the_runs_own_judgement_is_what_is_stored(run: Path) -> None:
    for one in reverify(run, None, None, None):
        assert one.num_rows == 8 and one.changed_scores == 0
        assert one.scores[0] == one.scores[1] and one.advantages[0] == one.advantages[1] > 0
        assert one.losses is not None and one.losses[0] == one.losses[1]


def test_another_reward_and_estimator(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.py"
    file.write_text("def pays(data_source, solution_str, ground_truth, extra_info):\n    return 2.0\n")
    (flat,) = reverify(run, f"{file}:pays", None, 2)
    assert flat.step == 2 and flat.changed_scores == 8
    assert flat.scores[1] == 2.0 and flat.advantages[1] == 0.0 and flat.losses is not None
    assert flat.losses[1] == 0.0
    (rloo,) = reverify(run, None, "rloo", 1)
    scores = KeptRows(run).read(1).rows.batch["token_level_scores"].sum(-1).view(4, 2)
    sizes = (scores[:, 0] - scores[:, 1]).abs()  # of both rows of a group, by tokens
    assert rloo.changed_scores == 0 and 0 < rloo.advantages[1] <= float(sizes.max())
    assert torch.isfinite(torch.tensor(rloo.losses)).all()
    assert main(["reverify", str(run), "--reward", f"{file}:pays", "--step", "1"]) == 0
    assert "→ 2 " in capsys.readouterr().out


def test_an_estimator_whose_columns_are_missing_is_refused(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"gae needs values"):
        reverify(run, None, "gae", 1)
