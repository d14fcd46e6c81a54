"""The public names, their signatures and the page that lists them."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import hybridflow

ROOT = Path(__file__).parents[3]
COMMON = (
    "model: 'Model | None' = None, tokenizer: 'Any' = None, {}dataset: 'Dataset | None' = None, val_dataset: "
    "'Dataset | None' = None, output_dir: 'str | os.PathLike[str] | None' = None, resume: 'bool | str | "
    "os.PathLike[str] | None' = None, callbacks: 'Callbacks' = (), overrides: 'Overrides' = (), "
    "progress: 'bool' = True) -> 'Run'"
)
REWARDS = (
    "reward: 'Reward | Sequence[Reward | tuple[Reward, float]] | None' = None, environment: 'str | type | "
    "None' = None, environment_options: 'Mapping[str, Any] | None' = None, "
)
RECIPE = "(recipe: 'str | os.PathLike[str] | None' = {!r}, *, "
SIGNATURES = {
    "train": RECIPE.format("grpo") + COMMON.format(REWARDS),
    "sft": RECIPE.format(None) + COMMON.format(""),
    "dpo": RECIPE.format("dpo") + COMMON.format(""),
    "reward_model": RECIPE.format("reward_model") + COMMON.format(""),
}
MEMBERS = {
    "Callback": [
        "on_checkpoint",
        "on_run_end",
        "on_run_start",
        "on_samples",
        "on_step_end",
        "on_validation",
    ],
    "Run": [
        "checkpoint",
        "config",
        "curve",
        "metrics",
        "model",
        "open",
        "report",
        "samples",
        "validation",
        "validation_samples",
    ],
}
NAMES = [
    "Callback",
    "DataProto",
    "Environment",
    "HybridFlowError",
    "PPOConfig",
    "Run",
    "SFTConfig",
    "Step",
    "StopTraining",
    "__version__",
    "dpo",
    "reward_model",
    "sft",
    "tool",
    "train",
]


def test_names_and_signatures_are_these() -> None:
    assert sorted(hybridflow.__all__) == NAMES
    assert {name: str(inspect.signature(getattr(hybridflow, name))) for name in SIGNATURES} == SIGNATURES
    for name, members in MEMBERS.items():
        found = vars(getattr(hybridflow, name))
        assert sorted(member for member in found if not member.startswith("_")) == members


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(?:hybridflow\.|Run\.|run\.|Callback\.)?(\w+)", page))
    missing = {*NAMES, *MEMBERS["Callback"], *MEMBERS["Run"]} - told
    parameters = set(inspect.signature(hybridflow.train).parameters) - told
    assert not missing and not parameters
