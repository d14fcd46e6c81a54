"""What an estimator with a key of its own costs: its file, a line in the table, a line of facts, and the key.

A copy of the package gets a toy estimator through these four places only. It is then read, noted, explained
and documented like the others.
"""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
from pathlib import Path

from sources import PACKAGE, ROOT

TOY = '''"""A toy."""

from torch import Tensor

from hybridflow.algorithms.advantages.types import Advantages


def toy(token_level_rewards: Tensor, *, toy_scale: float) -> Advantages:
    """A = κ·r."""
    scaled = toy_scale * token_level_rewards
    return Advantages(scaled, scaled)
'''
INSERTED = {
    "algorithms/advantages/__init__.py": {
        '    "gae": AdvantageEstimator.of(gae),\n': '    "toy": AdvantageEstimator.of(toy),\n',
        "from hybridflow.algorithms.advantages.gae import gae\n": (
            "from hybridflow.algorithms.advantages.toy import toy\n"
        ),
    },
    "config/algorithm_names.py": {
        "ESTIMATORS: dict[str, EstimatorFacts] = {\n": (
            '    "toy": EstimatorFacts("A = {toy_scale}·r", ("2401.00001",), '
            '("token_level_rewards", "toy_scale")),\n'
        ),
    },
    "config/algorithm.py": {
        '    """Advantages, KL penalties, and the groups and rows that are learned from."""\n\n': (
            '    toy_scale: float = key(2.0, "Scale of toy advantages.", symbol="κ")\n'
        ),
    },
}
RUN = """
import torch
from hybridflow.config import PPOConfig
from hybridflow.config.checks.notes import ppo_notes
from hybridflow.config.load import prepare_config
from hybridflow.explain.algorithm import explain_algorithm
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimator

config = prepare_config(
    PPOConfig,
    ["algorithm.adv_estimator=toy", "algorithm.toy_scale=3"],
    runs=False,
    needs_model=False,
    needs_files=False,
).config
rewards = torch.ones(2, 4)
batch = DataProto.from_dict(
    {"token_level_rewards": rewards, "response_mask": rewards.bool()}, {"uid": ["a", "b"]}
)
rows = estimate_advantages(batch, config, find_estimator(config.algorithm))
assert bool((rows.batch["advantages"] == 3.0).all())
(formula,) = [f for s in explain_algorithm(config) if s.title.startswith("the advantage") for f in s.formulas]
assert (formula.equation, formula.with_numbers) == ("A = κ·r", "A = 3.0·r"), formula
notes = list(ppo_notes(PPOConfig(), {"algorithm.toy_scale"}))
assert "algorithm.toy_scale is read by toy only: algorithm.adv_estimator=gae" in notes, notes
import config_docs
assert "toy_scale" in config_docs.render()
"""


def changed(copy: Path) -> list[str]:
    """The files of the copy that are new or not those of the package."""
    return sorted(
        str(path.relative_to(copy))
        for path in copy.rglob("*.py")
        if not (PACKAGE / path.relative_to(copy)).is_file()
        or not filecmp.cmp(path, PACKAGE / path.relative_to(copy), shallow=False)
    )


def test_four_places_make_an_estimator_with_a_key(tmp_path: Path) -> None:
    copy = tmp_path / "hybridflow"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in INSERTED.items():
        text = (copy / name).read_text(encoding="utf-8")
        for after, line in lines.items():
            assert text.count(after) == 1, (name, after)
            text = text.replace(after, after + line)
        (copy / name).write_text(text, encoding="utf-8")
    (copy / "algorithms/advantages/toy.py").write_text(TOY, encoding="utf-8")
    assert changed(copy) == sorted([*INSERTED, "algorithms/advantages/toy.py"])
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "scripts")])
    subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, check=True
    )
