"""Every key that a page or an example script sets is one that the schema knows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hybridflow.config import RUNS, PPOConfig, SFTConfig
from hybridflow.config.tree import blocks_of, keys_of
from hybridflow.config.verl_keys import status
from hybridflow.trainer import main_eval, main_generation

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples" / "cluster").iterdir()]
)
KEYS = {key for root in RUNS.values() for key in keys_of(root)}
OWN = {*KEYS, *(block for root in RUNS.values() for block in blocks_of(root))}
BLOCKS = (
    "data",
    "actor_rollout_ref",
    "critic",
    "reward",
    "algorithm",
    "distillation",
    "trainer",
    "ray_kwargs",
    "model",
    "optim",
    "engine",
    "checkpoint",
)
SET = re.compile(rf"(?<![\w./-])((?:{'|'.join(BLOCKS)})(?:\.[a-z_]+)+)=")


def known(key: str) -> bool:
    """A key of a root, one below a free block, or the end of one whose block a page has named."""
    if key in (*main_generation.RENAMED, *main_eval.RENAMED, main_generation.OUTPUT):
        return True
    if any(key == own or own.endswith("." + key) for own in OWN) or any(
        key.startswith(own + ".") for own in KEYS
    ):
        return True
    return any(status(root, key, "x").kind not in ("unknown", "refused") for root in (PPOConfig, SFTConfig))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_sets_keys_that_exist(page: Path) -> None:
    keys = set(SET.findall(page.read_text(encoding="utf-8")))
    assert not sorted(key for key in keys if not known(key))


def test_the_pages_set_keys() -> None:
    keys = {key for page in PAGES for key in SET.findall(page.read_text(encoding="utf-8"))}
    assert {"trainer.n_gpus_per_node", "data.train_files", "trainer.max_restarts"} <= keys
    assert not known("trainer.n_gpus_per_nod")
