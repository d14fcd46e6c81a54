"""The names of files and folders inside a run folder.

RUN/latest_checkpointed_iteration.txt     the step that was saved last, for people and other tools
RUN/global_step_N/manifest.json           size and digest of every file below
RUN/global_step_N/data/, trainer/         state.json, state.safetensors
RUN/global_step_N/ROLE/state.json         an engine's state: its structure and its numbers
RUN/global_step_N/ROLE/shards.json        the file of each part of each tensor
RUN/global_step_N/ROLE/PART_world_size_W_rank_R.safetensors
RUN/global_step_N/actor/huggingface/      configuration, tokenizer, and weights if they were asked for
"""

from __future__ import annotations

import re
from pathlib import Path

ACTOR = "actor"
REFERENCE = "reference"
DATA = "data"
TRAINER = "trainer"
HF_FOLDER = "huggingface"

STEP_PREFIX = "global_step_"
TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "manifest.json"
STRUCTURE = "state.json"
TENSORS = "state.safetensors"
SHARDS = "shards.json"
LOCK = ".checkpoint_lock"

MODEL = "model"
"""The key of the module's parameters in an engine's state."""

_STEP = re.compile(rf"{STEP_PREFIX}(\d+)")


def shard_file(part: str, rank: int, world_size: int) -> str:
    """Return the name of the file with a rank's share of a part of an engine's state."""
    return f"{part}_world_size_{world_size}_rank_{rank}.safetensors"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint folder, or None for any other name."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        return None
    return int(match.group(1))


def step_folders(run_dir: Path) -> list[Path]:
    """Return all checkpoint folders of a run by ascending step, whether they are complete or not."""
    if not run_dir.is_dir():
        return []
    found = [
        (step, path) for path in run_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()
    ]
    return [path for _, path in sorted(found)]
