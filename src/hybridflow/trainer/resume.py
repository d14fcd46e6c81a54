"""The choice of the checkpoint to resume from, and whether and with which parts it fits this run."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import STRUCTURE, TRAINER
from hybridflow.checkpoint.manifest import as_dict, folders_by_age, read_manifest
from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.model import CheckpointContentsConfig
from hybridflow.errors import CheckpointError
from hybridflow.trainer.model_facts import changed_facts, model_facts

logger = logging.getLogger(__name__)

MODELS = "models"
"""The entry of the driver's state with the facts of the models that a checkpoint was made with."""
ENGINE_PARTS = {"model": ("model",), "optimizer": ("optimizer",), "extra": ("scheduler",)}
"""What the words of `checkpoint.save_contents` mean in an engine's state."""

SPREADS = {
    "fsdp_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "virtual_pipeline_parallel_size",
    "expert_parallel_size",
    "context_parallel",
    "ulysses_sequence_parallel_size",
    "tensor_model_parallel_size",
    "reshard_after_forward",
    "forward_prefetch",
    "param_offload",
    "optimizer_offload",
    "offload_policy",
}
"""Keys, by their last word, that say where a model is and not what it learns."""


@contextmanager
def written_by_a_run() -> Iterator[None]:
    """Raise CheckpointError where the driver's state in a checkpoint has not the fields that a run writes."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of the driver in the checkpoint was not written by a run: {type(error).__name__}: "
            f"{error}"
        ) from error


def check_belongs(state: Mapping[str, Any], *, kind: str, seed: int) -> None:
    """Raise CheckpointError for the state of no run, of another kind (`ppo`, `sft`) or of another seed."""
    anew = "start anew with trainer.resume_mode=disable or another trainer.default_local_dir"
    with written_by_a_run():
        saved = as_dict(state.get(TRAINER, {}), TRAINER)
        saved_kind = saved.get("kind")
        if saved_kind != kind:
            raise CheckpointError(
                f"The checkpoint belongs to a run of kind {saved_kind!s:.80}, this one is of kind {kind}: "
                f"{anew}. To start from its weights, "
                "`hybridflow merge` it and set the model's path to the folder"
            )
        saved_seed = int(saved["seed"])
    if saved_seed != seed:
        raise CheckpointError(
            f"The checkpoint belongs to a run with trainer.seed={saved_seed}, this one has {seed}: set "
            f"the same seed, or {anew}."
        )


def check_models(saved: Mapping[str, Any], now: Mapping[str, Any], *, allowed: bool, path: Path) -> None:
    """Raise CheckpointError for the driver's state of a checkpoint that was made with other models.

    `now` is what `model_facts` gives. `allowed` (trainer.resume_other_model) makes it a warning.
    """
    with written_by_a_run():
        facts = as_dict(saved.get(MODELS, now), MODELS)
    changed = changed_facts(facts, now)
    if not changed:
        return
    if allowed:
        for line in changed:
            logger.warning("the checkpoint was made with another model (%s): its weights are taken", line)
        return
    lines = "\n".join(f"  - {line}" for line in changed)
    raise CheckpointError(
        f"{path} was made with another model than this run has, so its weights do not belong here:\n{lines}\n"
        "Give the run what the checkpoint was made with. To begin anew, set trainer.resume_mode=disable, or "
        "another trainer.experiment_name or trainer.default_local_dir. Where both are the same for you, set "
        "trainer.resume_other_model=true"
    )


def check_resume(config: PPOConfig | SFTConfig) -> None:
    """Raise CheckpointError where the checkpoint that a run would go on from belongs to another one.

    Neither torch nor a model is loaded, and of the files only the driver's own are read: where those are
    damaged, the checkpoint before it is looked at, as when it is loaded. Nothing is said of one that has to
    be fetched first.
    """
    trainer = config.trainer
    if trainer.resume_mode == "disable":
        return
    folders = folders_by_age(Path(trainer.default_local_dir).expanduser())[::-1]
    if trainer.resume_mode == "resume_path":
        folders = [Path(str(trainer.resume_from_path)).expanduser()]
    for folder in folders:
        try:
            if read_manifest(folder).damage(folder, below=TRAINER) is not None:
                continue
            state = json.loads((folder / TRAINER / STRUCTURE).read_text(encoding="utf-8"))
        except (CheckpointError, OSError, ValueError, RecursionError):
            continue
        check_belongs({TRAINER: state}, kind=kind_of_run(config), seed=trainer.seed)
        check_models(state, model_facts(config), allowed=trainer.resume_other_model, path=folder)
        return


def kind_of_run(config: PPOConfig | SFTConfig) -> str:
    """Return the kind of a run, which its checkpoints have."""
    if isinstance(config, PPOConfig):
        return "ppo"
    if isinstance(config, DPOConfig):
        return "dpo"
    return "reward_model" if isinstance(config, RewardModelConfig) else "sft"


def parts_to_save(contents: CheckpointContentsConfig) -> tuple[str, ...]:
    """Return the parts of an engine's state that `checkpoint.save_contents` names."""
    return tuple(
        part for word, parts in ENGINE_PARTS.items() if word in contents.save_contents for part in parts
    )


def parts_to_load(name: str, saved: Collection[str], contents: CheckpointContentsConfig) -> tuple[str, ...]:
    """Return the parts that `checkpoint.load_contents` names and the checkpoint has; warn of missing ones.

    Raises CheckpointError where the model is missing.
    """
    wanted = [
        part for word, parts in ENGINE_PARTS.items() if word in contents.load_contents for part in parts
    ]
    missing = [part for part in wanted if part not in saved]
    if "model" in missing:
        raise CheckpointError(
            f"The checkpoint has no model of the {name}: its run saved without (checkpoint.save_contents)."
        )
    if missing:
        logger.warning(
            "the checkpoint has no %s of the %s (checkpoint.save_contents): it starts afresh",
            " and no ".join(missing),
            name,
        )
    return tuple(part for part in wanted if part in saved)


def say_where(done: int, total: int, path: Path) -> None:
    """Log where a resumed run goes on, or that nothing is left of it."""
    logger.info("resumed after step %d from %s", done, path)
    if done >= total:
        logger.warning(
            "the run is complete: %d of %d steps are done, none is left. To train on, raise "
            "trainer.total_epochs or trainer.total_training_steps; to start anew, set "
            "trainer.resume_mode=disable or another trainer.experiment_name",
            done,
            total,
        )


def say_changes(done: int, changed: Sequence[str]) -> None:
    """Warn of each setting changed on resume, except those of the run's length, output and machines."""
    telling = [
        change
        for change in changed
        if not change.startswith("trainer.") and change.partition(":")[0].rpartition(".")[2] not in SPREADS
    ]
    for change in telling if done else ():
        logger.warning("the run goes on with another setting than it had: %s", change)
