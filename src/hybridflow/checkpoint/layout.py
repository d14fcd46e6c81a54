"""Names inside a run folder.

RUN/latest_checkpointed_iteration.txt          the step saved last, for people and other tools
RUN/global_step_N/manifest.json                size and digest of every file below
RUN/global_step_N/data/, trainer/              state.json, state.safetensors
RUN/global_step_N/ROLE/state.json              an engine's state: structure and numbers
RUN/global_step_N/ROLE/shards.json             which part of which tensor is in which file
RUN/global_step_N/ROLE/PART_world_size_W_rank_R.safetensors
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
SHARDS = "shards.json"
LOCK = ".checkpoint_lock"

MODEL = "model"
"""Key of an engine's state under which the module's parameters are."""

_STEP = re.compile(rf"{STEP_PREFIX}(\d+)")


def shard_file(part: str, rank: int, world_size: int) -> str:
    """Name of the file with what a rank holds of a part of an engine's state."""
    return f"{part}_world_size_{world_size}_rank_{rank}.safetensors"


def step_of(path: Path) -> int | None:
    """The step of a checkpoint folder, None for any other name."""
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def step_folders(run_dir: Path) -> list[Path]:
    """All checkpoint folders of a run by ascending step, whole or not."""
    if not run_dir.is_dir():
        return []
    found = [
        (step, path) for path in run_dir.iterdir() if (step := step_of(path)) is not None and path.is_dir()
    ]
    return [path for _, path in sorted(found)]
