"""What an estimator or a loss with a key of its own costs: its file, a line in the catalog, and the key.

A copy of the package gets a toy of each through these places only. They are then read, noted, explained and
documented like the others.
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
TOY_LOSS = '''"""A toy (2401.00002)."""

from hybridflow.algorithms.aggregation import LossOutput
from hybridflow.algorithms.policy_losses.inputs import LossInputs, finish_loss


def toy(inputs: LossInputs, *, toy_pull: float = 0.5, loss_agg_mode: str = "token-sum") -> LossOutput:
    """ξ·logπ."""
    tokens = inputs.tokens
    return finish_loss(inputs, toy_pull * tokens.log_prob, loss_agg_mode)
'''
WRITTEN = {"algorithms/advantages/toy.py": TOY, "algorithms/policy_losses/toy.py": TOY_LOSS}
INSERTED = {
    "algorithms/catalog.py": {
        '    "gae": EstimatorFacts("gae:gae"),\n': '    "toy": EstimatorFacts("toy:toy"),\n',
        '    "sapo": LossFacts("sapo:sapo"),\n': '    "toy": LossFacts("toy:toy"),\n',
    },
    "config/actor_rollout_ref.py": {
        '    """The policy loss and the parameters of single losses."""\n\n': (
            '    toy_pull: float = key(0.5, "Pull of the toy loss.", symbol="ξ")\n'
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
from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config import PPOConfig
from hybridflow.config.checks.notes import ppo_notes
from hybridflow.config.load import prepare_config
from hybridflow.explain.algorithm import explain_algorithm
from hybridflow.protocol import DataProto
from hybridflow.trainer.ppo.columns import estimate_advantages, find_estimator
from hybridflow.workers.losses import find_policy_loss, policy_loss

config = prepare_config(
    PPOConfig,
    [
        "algorithm.adv_estimator=toy",
        "algorithm.toy_scale=3",
        "actor_rollout_ref.actor.policy_loss.loss_mode=toy",
        "actor_rollout_ref.actor.policy_loss.toy_pull=4",
    ],
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
formulas = {s.title.partition(":")[0]: s.formulas for s in explain_algorithm(config)}
(formula,) = formulas["the advantage"]
assert (formula.equation, formula.with_numbers) == ("A = κ·r", "A = 3.0·r"), formula
actor = config.actor_rollout_ref.actor
mask = rewards.bool()
rows = batch | DataProto.from_dict({"old_log_probs": rewards, "advantages": rewards, "loss_mask": mask})
function = policy_loss(actor, LossScale.count(mask), find_policy_loss(actor))
assert actor.loss_agg_mode == "token-sum" and float(function({"log_probs": rewards}, rows)[0]) == 4.0 * 8
(formula,) = formulas["the policy loss"]
assert (formula.with_numbers, formula.sources) == ("4.0·logπ", ("https://arxiv.org/abs/2401.00002",)), formula
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


def test_three_places_make_an_estimator_or_a_loss_with_a_key(tmp_path: Path) -> None:
    copy = tmp_path / "hybridflow"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, lines in INSERTED.items():
        text = (copy / name).read_text(encoding="utf-8")
        for after, line in lines.items():
            assert text.count(after) == 1, (name, after)
            text = text.replace(after, after + line)
        (copy / name).write_text(text, encoding="utf-8")
    for name, text in WRITTEN.items():
        (copy / name).write_text(text, encoding="utf-8")
    assert changed(copy) == sorted([*INSERTED, *WRITTEN])
    paths = os.pathsep.join([str(tmp_path), str(ROOT / "scripts")])
    subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, check=True
    )
