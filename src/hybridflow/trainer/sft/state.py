"""The state of a supervised run: model, optimizer, data position, step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hybridflow.checkpoint.layout import ACTOR, DATA, HF_FOLDER, TRAINER
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.sft import SFTRow
from hybridflow.workers.sft import SFTGroup

logger = logging.getLogger(__name__)


@dataclass
class SFTState:
    """Where a supervised run is."""

    group: SFTGroup
    loader: StatefulLoader[SFTRow]
    write_huggingface: Callable[[Path], None]
    step: int = 0

    def save(self, store: CheckpointStore) -> Path:
        """Write a checkpoint of this step, with the model as a Hugging Face folder in it."""
        state = {ACTOR: self.group.state_dict(), DATA: self.loader.state_dict(), TRAINER: {"step": self.step}}
        return store.save(self.step, state, folders={f"{ACTOR}/{HF_FOLDER}": self.write_huggingface})

    def resume(self, store: CheckpointStore, mode: str, path: str | None) -> int:
        """Take over the checkpoint that `trainer.resume_mode` asks for; gives the number of steps done."""
        if mode == "disable":
            return 0
        loaded = store.load(Path(path).expanduser()) if mode == "resume_path" and path else store.load_latest()
        if loaded is None:
            return 0
        self.group.load_state_dict(loaded.state[ACTOR])
        self.loader.load_state_dict(loaded.state[DATA])
        self.step = int(loaded.state[TRAINER]["step"])
        logger.info("resumed after step %d from %s", self.step, loaded.path)
        return self.step
