"""The state of a supervised run: model, optimizer, data position, step.

It holds no random state: every draw is keyed by (seed, purpose, epoch), so seed and position are enough.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, DATA, HF_FOLDER, TRAINER
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.sft import SFTRow
from hybridflow.trainer.resume import check_belongs, find, parts_to_load, say_where, written_by_a_run
from hybridflow.trainer.saving import RunSaves, SavedEngine
from hybridflow.workers.sft import SFTGroup


@dataclass
class SFTState:
    """The state of a supervised run."""

    group: SFTGroup
    loader: StatefulLoader[SFTRow]
    contents: CheckpointContentsConfig
    """Parts that are saved and loaded."""
    write_huggingface: Callable[[Path, bool], Mapping[str, FileDigest] | None]
    """(folder, with weights): writes config, tokenizer and, if asked, the weights; gives digests that are
    known already.
    """
    total_steps: int
    seed: int
    step: int = 0
    """Steps that are done."""
    saved_step: int = 0
    """The step of the newest checkpoint that this run has saved or resumed from."""
    validation_due: bool = False
    """True: a signal has ended the run before the validation of its last step."""
    saves: RunSaves = field(default_factory=RunSaves)
    _position: dict[str, Any] = field(default_factory=dict)
    """Where the loader was after the step that `finish` was told last."""
    _finished: int | None = None

    def finish(self, step: int) -> None:
        """Note that a step is done: until the next one changes weights, `save` saves the run as it is now,
        also where the next one has taken conversations already.
        """
        self.step = step
        self._finished = step
        self._position = copy.deepcopy(self.loader.state_dict())

    def save(self, store: CheckpointStore) -> Path:
        """Save the last whole step; gives where its checkpoint is or, with `checkpoint.async_save`, will be
        when it is whole.
        """
        position = self._position
        if self._finished != self.step:
            position = self.loader.state_dict()
        state = {
            DATA: position,
            TRAINER: {
                "kind": "sft",
                "step": self.step,
                "seed": self.seed,
                "validation_due": self.validation_due,
            },
        }
        with_weights = "hf_model" in self.contents.save_contents
        folders = {f"{ACTOR}/{HF_FOLDER}": lambda folder: self.write_huggingface(folder, with_weights)}
        engines = {ACTOR: SavedEngine(self.group, self.contents)}
        path = self.saves.save(store, self.step, state, engines, folders)
        self.saved_step = self.step
        return path

    def resume(self, store: CheckpointStore, mode: str, path: str | None) -> int:
        """Go on from the checkpoint that `trainer.resume_mode` asks for; gives the number of steps done, 0
        without one.
        """
        loaded = find(store, mode, path)
        if loaded is None:
            return 0
        check_belongs(loaded.state, kind="sft", seed=self.seed)
        self.group.load(
            loaded.path / ACTOR, parts_to_load("model", loaded.engines.get(ACTOR, ()), self.contents)
        )
        with written_by_a_run():
            self.loader.load_state_dict(loaded.state[DATA])
            self.step = int(loaded.state[TRAINER]["step"])
        self.saved_step = self.step
        self.validation_due = bool(loaded.state[TRAINER].get("validation_due", False))
        say_where(self.step, self.total_steps, loaded.path)
        return self.step
