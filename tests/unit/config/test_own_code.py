"""A user's own code is refused by its source, which is read and never run; what that leaves open is not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from possible_run import problem, rows, table

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config

LOSS = "actor_rollout_ref.actor.policy_loss"
ROLLOUT = "actor_rollout_ref.rollout"
NEVER_RUN = "raise SystemExit('this file was run')\n"


def keys_of(base: list[str], folder: Path, source: str, keys: str) -> list[str]:
    """Write the source as mine.py, and return the keys with its path in the place of MINE."""
    (folder / "mine.py").write_text(NEVER_RUN + textwrap.dedent(source))
    return [*base, *keys.replace("MINE", str(folder / "mine.py")).split(" ")]


REWARDS = "reward.custom_reward_function.path=MINE"
SHORT = {
    "loss": f"{LOSS}.loss_mode=MINE:f",
    "estimator": "algorithm.adv_estimator=MINE:f",
    "reward": REWARDS,
    "environment": "data.environment=MINE:E",
    "agent": f"{ROLLOUT}.agent.default_agent_loop=MINE:A",
    "policy_loss": LOSS,
    "rollout": ROLLOUT,
}
TABLE = table("own_code.yaml")


@pytest.mark.parametrize(("keys", "texts"), rows(TABLE["refused"], SHORT))
def test_what_cannot_be_called_is_refused_unread(
    base: list[str], tmp_path: Path, keys: list[str], texts: list[str]
) -> None:
    source, *says = texts
    message = problem(keys_of(base, tmp_path, source, " ".join(keys)))
    for part in says:
        assert any(each in message for each in part.split("|")), message


@pytest.mark.parametrize(("keys", "texts"), rows(TABLE["accepted"], SHORT))
def test_what_the_source_leaves_open_is_not_refused(
    base: list[str], tmp_path: Path, keys: list[str], texts: list[str]
) -> None:
    (source,) = texts
    prepare_config(PPOConfig, keys_of(base, tmp_path, source, " ".join(keys)))


def test_a_sum_too_long_to_be_read_leaves_all_open(base: list[str], tmp_path: Path) -> None:
    source = f"x = {' + '.join('1' * 9000)}\ndef f(x): ..."
    prepare_config(PPOConfig, keys_of(base, tmp_path, source, SHORT["loss"]))


@pytest.mark.parametrize("packages", [("shelf", "shelf/inner"), ("shelf",), ("shelf/inner",), ()])
def test_a_module_is_read_by_its_dotted_name(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...]
) -> None:
    """Also where some of its folders have no __init__.py."""
    (tmp_path / "shelf/inner").mkdir(parents=True)
    for folder in packages:
        (tmp_path / folder / "__init__.py").write_text(NEVER_RUN)
    (tmp_path / "shelf/inner/mine.py").write_text(f"{NEVER_RUN}def f(log_prob, uid): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert "no uid (did you mean group_ids?)" in problem(base, f"{LOSS}.loss_mode=shelf.inner.mine:f")
    prepare_config(PPOConfig, [*base, f"{LOSS}.loss_mode=no.such.module:f"])


def test_all_of_it_is_told_at_once_and_before_torch(base: list[str], tmp_path: Path) -> None:
    source = """
        import torch
        def loss(log_prob, uid): ...
        def estimate(rewards): ...
        def compute_score(solution_str, gold): ...
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    keys = (
        f"{LOSS}.loss_mode=MINE:loss algorithm.adv_estimator=MINE:estimate {REWARDS} "
        "actor_rollout_ref.rollout.n=0 data.train_batch_size=8"
    )
    words = [*base, *keys.replace("MINE", str(tmp_path / "mine.py")).split(" ")]
    program = (
        "import sys\nfrom hybridflow.trainer.main_ppo import main\n"
        f"status = main({words[:-2]!r})\nprint(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
    assert "3 problems" in done.stderr and done.stderr.count("did you mean") == 3, done.stderr


def test_a_sampler_without_a_name_is_told_once(base: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("class Mine: pass\n")
    said = problem(base, f"data.sampler.class_path={tmp_path}/own.py")
    assert said == (
        f"data.sampler.class_path={tmp_path}/own.py without a name: set data.sampler.class_name, or write "
        f"{tmp_path}/own.py:NAME"
    )
