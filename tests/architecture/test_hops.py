"""ARCHITECTURE.md lists the way from the command to the line that computes the loss; a run of one step goes
that way.
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sources import PACKAGE, ROOT

from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.models.tiny import create_tiny_model
from hybridflow.trainer.main_ppo import main

MAX_HOPS = 10
MAX_FILES = 7
MAX_LINES = 450
WHOLE = re.compile(r"The whole stack has (\d+) calls of our own in (\d+) files")
ROW = re.compile(r"^\| \d+ \| `([\w/]+\.py)` \| `([\w.]+)` \|", re.MULTILINE)


def listing() -> list[tuple[str, str]]:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## From the command to the loss")[2].partition("\n## ")[0]
    return ROW.findall(section)


def stack() -> list[tuple[str, str, int]]:
    """(file, qualified name, lines of the definition) of our own frames, the outermost first."""
    found = []
    frame = sys._getframe(1)
    while frame:
        code = frame.f_code
        if PACKAGE in Path(code.co_filename).parents:
            lines = {line for _, _, line in code.co_lines() if line}
            name = code.co_qualname.replace(".<locals>", "")
            found.append(
                (str(Path(code.co_filename).relative_to(PACKAGE)), name, max(lines) - min(lines) + 1)
            )
        frame = frame.f_back  # type: ignore[assignment]
    return found[::-1]


def test_the_way_from_the_command_to_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vanilla = POLICY_LOSSES["vanilla"]
    seen = []

    def recorded(*arguments: Any, **keys: Any) -> Any:
        seen.append(stack())
        return vanilla.function(*arguments, **keys)

    recorded.__signature__ = inspect.signature(vanilla.function)  # type: ignore[attr-defined]
    monkeypatch.setitem(POLICY_LOSSES, "vanilla", replace(vanilla, function=recorded))
    model = create_tiny_model(tmp_path / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1)
    status = main(
        [
            "data.task={name: arithmetic_chain, size: 4, val_size: 0}",
            "data.train_batch_size=2",
            "data.max_prompt_length=32",
            "data.max_response_length=4",
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "algorithm.adv_estimator=grpo",
            "reward.num_workers=0",
            "trainer.total_training_steps=1",
            "trainer.logger=[]",
            "trainer.save_freq=-1",
            f"trainer.default_local_dir={tmp_path / 'run'}",
        ]
    )
    assert status == 0 and seen
    listed = listing()
    way = [(file, name) for file, name, _ in seen[0]]
    way = way[way.index(listed[0]) :]  # the wrapper that turns errors into a status stands before it
    assert listed[-1] == ("algorithms/policy_losses/vanilla.py", "vanilla")
    rest = iter(way)
    missing = [hop for hop in listed[:-1] if hop not in rest]
    assert not missing, f"not on the way, or not in this order: {missing}; the way is {way}"
    whole = WHOLE.search((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    assert whole is not None, "the text says how many calls and files the whole stack has"
    files = {file for file, _ in way} | {listed[-1][0]}
    assert (len(way), len(files)) == (int(whole[1]), int(whole[2])), [*way, *sorted(files)]
    between = {file for file, name in way if (file, name) not in listed}
    passed = (
        "trainer/main.py",
        "trainer/restarts.py",
        "trainer/ppo/overlap.py",
        "workers/mini_batches.py",
        "workers/actor.py",
        "workers/log_prob_check.py",
        "engines/fsdp/engine.py",
        "algorithms/policy_losses/types.py",
    )
    assert all(file.startswith("controller/") or file in passed for file in between), between
    assert len(listed) - 1 <= MAX_HOPS and len({file for file, _ in listed}) <= MAX_FILES
    assert sum(lines for file, name, lines in seen[0] if (file, name) in listed) <= MAX_LINES
