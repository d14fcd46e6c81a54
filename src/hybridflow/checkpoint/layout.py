"""Names inside a run folder.

RUN/latest_checkpointed_iteration.txt          the step saved last, for people and other tools
RUN/global_step_N/manifest.json                size and digest of every file below
RUN/global_step_N/ROLE/state.json, state.safetensors
RUN/global_step_N/actor/huggingface/           config, tokenizer, and weights if asked for
"""

from __future__ import annotations

import re
from pathlib import Path

ACTOR = "actor"
CRITIC = "critic"
REFERENCE = "reference"
PROCESS_REWARD = "process_reward"
DATA = "data"
TRAINER = "trainer"
HF_FOLDER = "huggingface"

STEP_PREFIX = "global_step_"
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STRUCTURE = "state.json"
TENSORS = "state.safetensors"
LOCK = ".checkpoint_lock"

MODEL = "model"
"""Key of an engine's state under which the module's parameters are."""

_STEP = re.compile(rf"{STEP_PREFIX}(\d+)")


def step_of(path: Path) -> int | None:
    """The step of a checkpoint folder, None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_folders(run_dir: Path) -> list[Path]:
    """All checkpoint folders of a run by ascending step, whole or not."""
    if not run_dir.is_dir():
        return []
    found = [(step, path) for path in run_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]
