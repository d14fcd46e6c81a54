"""The choice of the checkpoint to resume from, and whether and with which parts it fits this run.

A checkpoint means nothing without the models, adapters and tokenizer that it was made with.

config ──model_facts──► {key: identity or value}      kept in every checkpoint
facts of a checkpoint, facts of a run ──changed_facts──► a line for each that differs

A local folder is known by its content, so that a copy at another place is the same model, and a hub's model
by its name. No tensor is loaded: of the weights, their headers and some blocks of bytes are looked at.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import STRUCTURE, TRAINER
from hybridflow.checkpoint.manifest import as_dict, folders_by_age, read_manifest
from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.model import VOCABULARY_FILES, CheckpointContentsConfig, ModelConfig
from hybridflow.config.paths import is_remote, local
from hybridflow.errors import CheckpointError

logger = logging.getLogger(__name__)
VOLATILE = ("_name_or_path", "transformers_version")
"""Entries of a config.json that say where it comes from and by which version it was written."""
BLOCK = 4096
BLOCKS = 32
"""Number of blocks of bytes of a file of weights that are looked at, spread over all of it."""
MODELS = "models"
"""The entry of the driver's state with the facts of the models that a checkpoint was made with."""
ENGINE_PARTS = {"model": ("model",), "optimizer": ("optimizer",), "extra": ("scheduler",)}
"""What the words of `checkpoint.save_contents` mean in an engine's state."""

SPREADS = {
    "strategy",
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


def model_facts(config: PPOConfig | SFTConfig) -> dict[str, Any]:
    """Return the facts of the models that a checkpoint of this run has, by dotted key, in JSON's types."""
    models = {"model": config.model} if isinstance(config, SFTConfig) else _trained(config)
    facts: dict[str, Any] = {}
    for block, model in models.items():
        facts |= {f"{block}.{name}": value for name, value in _facts_of(model).items()}
    facts["data.tokenizer"] = _tokenizer_identity(str(config.data.tokenizer))
    read: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return read


def changed_facts(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return `key: old → new` for each fact that differs between a checkpoint and a run."""
    # a role that only one of them has is reported where its state is missing
    blocks = {key.rpartition(".")[0] for key in now} & {key.rpartition(".")[0] for key in saved}
    names = [key for key in {**saved, **now} if key.rpartition(".")[0] in blocks]
    return [f"{key}: {saved.get(key)} → {now.get(key)}" for key in names if saved.get(key) != now.get(key)]


def _trained(config: PPOConfig) -> dict[str, ModelConfig]:
    found = {"actor_rollout_ref.model": config.actor_rollout_ref.model}
    if config.critic.enable:
        found["critic.model"] = config.critic.model
    if config.reward.process_reward_model.enable:
        found["reward.process_reward_model.model"] = config.reward.process_reward_model.model
    return found


def _facts_of(model: ModelConfig) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "path": _model_identity(str(model.path)),
        "override_config": model.override_config,
        "lora_rank": model.lora_rank,
    }
    if model.quantization:
        facts["quantization"] = model.quantization
    if model.lora_adapter_path:
        facts["lora_rank"] = None
        facts["lora_adapter_path"] = _adapter_identity(model.lora_adapter_path)
    elif model.lora_rank:
        facts |= {
            "lora_alpha": model.lora_alpha,
            "target_modules": _in_order(model.target_modules),
            "exclude_modules": _in_order(model.exclude_modules),
        }
    return facts


def _in_order(modules: str | list[str] | None) -> str | list[str] | None:
    """Return names of modules, of which the order says nothing, always in the same one."""
    return sorted(set(modules)) if isinstance(modules, list) else modules


def _model_identity(path: str) -> str:
    """Return the architecture of a local folder with a digest of its content, or the name of any other."""
    folder = local(path)
    if is_remote(path) or not folder.is_dir():
        return path
    shape = _read_json(folder / "config.json")
    digest = hashlib.sha256(_canonical(shape, VOLATILE))
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        for block in _some_blocks(file):
            digest.update(block)
    name = shape.get("model_type", "model") if isinstance(shape, dict) else "model"
    return f"{name} {digest.hexdigest()[:16]}"


def _adapter_identity(path: str) -> str:
    """Return the digest of an adapter's settings: its weights are in the checkpoint."""
    folder = local(path)
    if is_remote(path) or not folder.is_dir():
        return path
    settings = _read_json(folder / "adapter_config.json")
    return f"adapter {hashlib.sha256(_canonical(settings, ('base_model_name_or_path',))).hexdigest()[:16]}"


def _tokenizer_identity(path: str) -> str:
    """Return the digest of the files of a local tokenizer that say its tokens, or the name of any other."""
    folder = local(path)
    files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
    if is_remote(path) or not files:
        return path
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode())
        digest.update(file.read_bytes())
    return f"tokenizer {digest.hexdigest()[:16]}"


def _some_blocks(file: Path) -> Iterator[bytes]:
    """Yield the size of a file, its header, and blocks of bytes that are spread over it."""
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as bytes_of:
        header = min(int.from_bytes(bytes_of.read(8), "little"), size)
        yield bytes_of.read(header)
        for number in range(BLOCKS):
            bytes_of.seek(max(0, size - BLOCK) * number // (BLOCKS - 1))
            yield bytes_of.read(BLOCK)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _canonical(content: Any, without: tuple[str, ...]) -> bytes:
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in without}
    return json.dumps(content, sort_keys=True).encode()


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
    """Raise CheckpointError where the checkpoint that a run would resume from belongs to another one.

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
            "trainer.total_epochs or trainer.total_training_steps; to start over, set "
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
