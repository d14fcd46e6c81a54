"""Everything that matters of a run, as one state: with it a resumed run goes on to the bit.

There is no random state in it: every draw is keyed by (seed, purpose, step, row), so the step number is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, CRITIC, DATA, HF_FOLDER, TRAINER
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.data.loader import StatefulLoader
from hybridflow.data.prompts import PromptRow
from hybridflow.errors import CheckpointError
from hybridflow.trainer.ppo.roles import Roles
from hybridflow.workers.bridge import KLController

logger = logging.getLogger(__name__)

ENGINE_PARTS = {"model": ("model",), "optimizer": ("optimizer",), "extra": ("scheduler",)}
"""What the words of `checkpoint.save_contents` mean in an engine's state."""


@dataclass
class RunState:
    """Where a run is: weights, optimizers, data position, KL coefficient and step."""

    roles: Roles
    loader: StatefulLoader[PromptRow]
    kl_controller: KLController
    contents: dict[str, CheckpointContentsConfig]
    """By role: what is saved and loaded."""
    write_huggingface: Callable[[Path, bool], None]
    """(folder, with weights) -> config, tokenizer and, if asked, the weights of the actor."""
    step: int = 0
    seed: int = 0
    _roles: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._roles = {ACTOR: self.roles.actor} | ({CRITIC: self.roles.critic} if self.roles.critic else {})

    def save(self, store: CheckpointStore) -> Path:
        """Write a checkpoint of this step."""
        state: dict[str, Any] = {
            DATA: self.loader.state_dict(),
            TRAINER: {"step": self.step, "seed": self.seed, "kl_controller": self.kl_controller.state_dict()},
        }
        for name, group in self._roles.items():
            wanted = {part for word in self.contents[name].save_contents for part in ENGINE_PARTS.get(word, ())}
            state[name] = {part: value for part, value in group.state_dict().items() if part in wanted}
        with_weights = "hf_model" in self.contents[ACTOR].save_contents
        return store.save(self.step, state, folders={f"{ACTOR}/{HF_FOLDER}": lambda folder: self.write_huggingface(folder, with_weights)})

    def resume(self, store: CheckpointStore, mode: str, path: str | None) -> int:
        """Take over the checkpoint that `trainer.resume_mode` asks for; gives the number of steps done, 0 without one."""
        if mode == "disable":
            return 0
        loaded = store.load(Path(path).expanduser()) if mode == "resume_path" and path else store.load_latest()
        if loaded is None:
            return 0
        self.take(loaded.state)
        logger.info("resumed after step %d from %s", self.step, loaded.path)
        return self.step

    def take(self, state: dict[str, Any]) -> None:
        """Take over a state, in place."""
        saved_seed = int(state[TRAINER]["seed"])
        if saved_seed != self.seed:
            raise CheckpointError(
                f"The checkpoint belongs to a run with trainer.seed={saved_seed}, this one has {self.seed}: "
                "set the same seed, or start anew with trainer.resume_mode=disable or another trainer.default_local_dir."
            )
        for name, group in self._roles.items():
            if name not in state:
                raise CheckpointError(f"The checkpoint has no '{name}': it was saved by a run without one.")
            group.load_state_dict(self._parts_to_load(name, state[name]))
        self.loader.load_state_dict(state[DATA])
        self.kl_controller.load_state_dict(state[TRAINER]["kl_controller"])
        self.step = int(state[TRAINER]["step"])

    def _parts_to_load(self, name: str, saved: dict[str, Any]) -> dict[str, Any]:
        wanted = {part for word in self.contents[name].load_contents for part in ENGINE_PARTS.get(word, ())}
        missing = sorted(wanted - saved.keys())
        if "model" in missing:
            raise CheckpointError(f"The checkpoint has no model of the {name}: its run saved without (checkpoint.save_contents).")
        if missing:
            logger.warning(
                "the checkpoint has no %s of the %s (checkpoint.save_contents): it starts afresh", " and no ".join(missing), name
            )
        return {part: value for part, value in saved.items() if part in wanted}
