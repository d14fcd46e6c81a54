"""The state of a run, from which a resumed run goes on to the bit.

It holds no random state: every draw is keyed by (seed, purpose, step, row), so the step number is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, DATA, HF_FOLDER, REFERENCE, TRAINER
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.store import Checkpoint, CheckpointStore
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.errors import CheckpointError
from hybridflow.trainer.ppo.columns import KLController
from hybridflow.trainer.ppo.exact import ExactState
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.trainer.resume import check_belongs, find, parts_to_load, say_where, written_by_a_run
from hybridflow.trainer.saving import RunSaves, SavedEngine

WEIGHTS_ONLY = CheckpointContentsConfig(save_contents=["model"], load_contents=["model"])
"""Contents of the checkpoint of a reference that moves: it has no optimizer, but its weights are needed to go
on to the bit.
"""


@dataclass
class RunState:
    """The state of a run: weights, optimizers, data position, KL coefficient, whether exact mode has ended,
    and step.
    """

    roles: Roles
    loader: StatefulLoader[PromptRow]
    kl_controller: KLController
    exact: ExactState
    contents: dict[str, CheckpointContentsConfig]
    """Parts that are saved and loaded, by role with an optimizer."""
    write_huggingface: Callable[[Path, bool], Mapping[str, FileDigest] | None]
    """(folder, with weights): writes config, tokenizer and, if asked, the weights of the actor; gives digests
    that are known already.
    """
    total_steps: int
    seed: int
    reference_moves: bool = False
    """True: the reference takes over the actor's weights now and then, so its own are part of the state."""
    step: int = 0
    """Steps that are done."""
    saved_step: int = 0
    """The step of the newest checkpoint that this run has saved or resumed from."""
    validation_due: bool = False
    """True: a signal has ended the run before the validation of its last step."""
    saves: RunSaves = field(default_factory=RunSaves)
    _finished: dict[str, Any] = field(default_factory=dict)
    """What the driver saves of the step that `finish` was told last."""
    _roles: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        learning = {name: getattr(self.roles, name) for name in self.contents}
        self._roles = {name: group for name, group in learning.items() if group is not None}
        if self.reference_moves:
            self._keep_reference()

    def _keep_reference(self) -> None:
        if self.roles.reference is not None:
            self._roles[REFERENCE] = self.roles.reference
            self.contents = {**self.contents, REFERENCE: WEIGHTS_ONLY}

    def finish(self, step: int) -> None:
        """Note that a step is done: until the next one changes weights, `save` saves the run as it is now,
        also where the next one has taken prompts already.
        """
        self.step = step
        self._finished = copy.deepcopy(self._drivers_part())

    def _drivers_part(self) -> dict[str, Any]:
        return {
            DATA: self.loader.state_dict(),
            TRAINER: {
                "kind": "ppo",
                "step": self.step,
                "seed": self.seed,
                "kl_controller": self.kl_controller.state_dict(),
                "exact": self.exact.state_dict(),
            },
        }

    def save(self, store: CheckpointStore) -> Path:
        """Save the last whole step; gives where its checkpoint is or, with `checkpoint.async_save`, will be
        when it is whole.
        """
        state = self._finished
        if not state or state[TRAINER]["step"] != self.step:
            state = self._drivers_part()
        state = {**state, TRAINER: {**state[TRAINER], "validation_due": self.validation_due}}
        engines = {name: SavedEngine(group, self.contents[name]) for name, group in self._roles.items()}
        with_weights = "hf_model" in self.contents[ACTOR].save_contents
        folders = {f"{ACTOR}/{HF_FOLDER}": lambda folder: self.write_huggingface(folder, with_weights)}
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
        self.restore(loaded)
        say_where(self.step, self.total_steps, loaded.path)
        return self.step

    def restore(self, loaded: Checkpoint) -> None:
        """Restore a checkpoint, in place."""
        state = loaded.state
        check_belongs(state, kind="ppo", seed=self.seed)
        # it had moved: it must not fall back to the start weights, even where it moves no more
        if REFERENCE in loaded.engines:
            self._keep_reference()
        for name, group in self._roles.items():
            if name not in loaded.engines:
                raise CheckpointError(f"The checkpoint has no '{name}': it was saved by a run without one.")
            group.load(loaded.path / name, parts_to_load(name, loaded.engines[name], self.contents[name]))
        with written_by_a_run():
            self.loader.load_state_dict(state[DATA])
            self.kl_controller.load_state_dict(state[TRAINER]["kl_controller"])
            # older checkpoints have none
            self.exact.load_state_dict(state[TRAINER].get("exact", {"ended": False}))
            self.step = int(state[TRAINER]["step"])
        self.saved_step = self.step
        self.validation_due = bool(state[TRAINER].get("validation_due", False))
