"""The state of a run, from which a resumed run goes on to the bit.

It holds no random state: every draw is keyed by the seed, a purpose and numbers of steps, groups or rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, DATA, HF_FOLDER, TRAINER
from hybridflow.checkpoint.manifest import FileDigest
from hybridflow.checkpoint.store import Checkpoint, CheckpointStore
from hybridflow.errors import CheckpointError
from hybridflow.trainer.resume import (
    MODELS,
    check_belongs,
    check_models,
    parts_to_load,
    say_where,
    written_by_a_run,
)
from hybridflow.trainer.saving import RunSaves, SavedEngine
from hybridflow.trainer.source import Resumable


@dataclass
class RunState:
    """The state of a run: weights, optimizers, place of the source, further parts of the driver, and step."""

    kind: str
    """`ppo`, `sft`, `dpo` or `reward_model`; a run goes on from checkpoints of its own kind only."""
    seed: int
    total_steps: int
    source: Resumable
    """The source of batches, which knows where in the data the run is."""
    engines: dict[str, SavedEngine]
    """The engines of a checkpoint by name; `actor` is the model that the run is about."""
    write_huggingface: Callable[[Path, bool], Mapping[str, FileDigest] | None]
    """(folder, with weights): writes config, tokenizer, the actor's weights if asked; gives known digests."""
    models: Mapping[str, Any] = field(default_factory=dict)
    """The facts of the run's models (`model_facts.py`), which a checkpoint that it goes on from has too."""
    may_change_model: bool = False
    """True: a checkpoint of other models is gone on from all the same, with a warning."""
    parts: Mapping[str, Resumable] = field(default_factory=dict)
    """Further state of the driver, by its name in a checkpoint."""
    begin_empty: Collection[str] = ()
    """Names of the parts that stay as they are where a checkpoint has none."""
    joining: Mapping[str, SavedEngine] = field(default_factory=dict)
    """Engines that become part of the state where the checkpoint that a run goes on from has them."""
    step: int = 0
    """Steps that are done."""
    saved_step: int = 0
    """The step of the newest checkpoint that this run has saved or resumed from."""
    validation_due: bool = False
    """True: a signal has ended the run before the validation of its last step."""
    saves: RunSaves = field(default_factory=RunSaves)
    _finished: dict[str, Any] = field(default_factory=dict)
    """What the driver saves of the step that `finish` was told last, beside the source's part."""

    def finish(self, step: int) -> None:
        """Note that a step is done: until the next one changes weights, `save` saves the run as it is now,
        also where the next one has taken prompts already.
        """
        self.step = step
        self._finished = self._trainers_part()

    def _trainers_part(self) -> dict[str, Any]:
        own = {"kind": self.kind, "step": self.step, "seed": self.seed, MODELS: dict(self.models)}
        further = {name: part.state_dict() for name, part in self.parts.items()}
        return {**own, **further}

    def save(self, store: CheckpointStore) -> Path:
        """Save the last whole step; gives where its checkpoint is or, with `async_save`, will be."""
        trainer = self._finished
        if not trainer or trainer["step"] != self.step:
            trainer = self._trainers_part()
        trainer = {**trainer, "validation_due": self.validation_due}
        state = {DATA: self.source.state_dict(), TRAINER: trainer}
        with_weights = "hf_model" in self.engines[ACTOR].contents.save_contents
        folders = {f"{ACTOR}/{HF_FOLDER}": lambda folder: self.write_huggingface(folder, with_weights)}
        path = self.saves.save(store, self.step, state, self.engines, folders)
        self.saved_step = self.step
        return path

    def resume(self, store: CheckpointStore, mode: str, path: str | None) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` asks for, if there is one."""
        if mode == "disable":
            return
        if mode == "resume_path" and path:
            loaded: Checkpoint | None = store.load(Path(path).expanduser())
        else:
            loaded = store.load_latest()
        if loaded is not None:
            self.restore(loaded)
            say_where(self.step, self.total_steps, loaded.path)

    def restore(self, loaded: Checkpoint) -> None:
        """Restore a checkpoint, in place."""
        state = loaded.state
        check_belongs(state, kind=self.kind, seed=self.seed)
        check_models(state[TRAINER], self.models or {}, allowed=self.may_change_model, path=loaded.path)
        self.engines |= {name: engine for name, engine in self.joining.items() if name in loaded.engines}
        for name, engine in self.engines.items():
            if name not in loaded.engines:
                raise CheckpointError(f"The checkpoint has no '{name}': it was saved by a run without one.")
            parts = parts_to_load(name, loaded.engines[name], engine.contents)
            engine.group.load(loaded.path / name, parts)
        with written_by_a_run():
            self.source.load_state_dict(state[DATA])
            for name, part in self.parts.items():
                if name in state[TRAINER] or name not in self.begin_empty:
                    part.load_state_dict(state[TRAINER][name])
            self.step = int(state[TRAINER]["step"])
            self.validation_due = bool(state[TRAINER]["validation_due"])
        self.saved_step = self.step
