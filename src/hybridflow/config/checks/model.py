"""The checks of model folders by their files alone: config.json, weights, tokenizer, chat template.

Each yields one line per problem. A hub name and an address with :// are not looked at here, and neither is a
file's content beyond its JSON: what only transformers or torch can find is reported when the model is loaded.
Below are the checks of kernels and pictures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridflow.config.checks.paths import first_row
from hybridflow.config.layout import ROLE_KEYS
from hybridflow.config.megatron import STRATEGIES, family_refusal
from hybridflow.config.model import NUMBERS_OF_EXPERTS, TOKENIZER_FILES, FSDPConfig, ModelConfig
from hybridflow.config.needs import built_models, needs_teacher, reads_text_alone, teacher_reader
from hybridflow.config.paths import is_remote, is_written_as_path, local
from hybridflow.config.reward import RewardModelRoleConfig, has_judge
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.tree import get_value

NUMBERS_OF_HEADS = ("num_attention_heads", "num_key_value_heads")
INDEX = "model.safetensors.index.json"
ACTOR_MODEL = "actor_rollout_ref.model"
TEACHER = "distillation.teacher_model"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "chat_templates")
EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"


def model_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each problem with the models of the roles that the run builds, but for weights."""
    first = None
    engines = {ROLE_KEYS[role].model: key for role, key in STRATEGIES.items()} | {"model": "engine.strategy"}
    for block, model, fsdp in built_models(config):
        if fsdp is not None:
            cores = block in engines and get_value(config, engines[block]) == "megatron"
            yield from _divided(model, fsdp, block, cores=cores)
        if isinstance(config, PPOConfig) and block == ACTOR_MODEL:
            rollout = config.actor_rollout_ref.rollout
            if rollout.name == "native":
                key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
                yield from _heads(_sizes(model), rollout.tensor_model_parallel_size, key, block, model)
        if isinstance(config, PPOConfig) and block == TEACHER and not model.path:
            yield (
                f"{teacher_reader(config)} needs a teacher, and "
                f"{TEACHER}.path is not set: give a Hugging Face folder or a hub name of a model with the "
                "same tokenizer"
            )
        elif first is None or model.path != first.path:
            yield from model_problem(model, block, first.path if first else None)
        first = first or model
    for block, model in _named_teachers(config):
        yield from model_problem(model, block, first.path if first else None)
    if isinstance(config, PPOConfig) and has_judge(config.reward):
        yield from _judge(config.reward.reward_model)


def _named_teachers(config: PPOConfig | SFTConfig) -> Iterator[tuple[str, ModelConfig]]:
    """Yield the teachers beside `teacher_model`, whose other keys are those of it."""
    if isinstance(config, PPOConfig) and needs_teacher(config):
        for name, path in config.distillation.teachers.items():
            model = replace(config.distillation.teacher_model, path=path)
            yield f"distillation.teachers.{name}", model


def _divided(model: ModelConfig, fsdp: FSDPConfig, key: str, *, cores: bool) -> Iterator[str]:
    """Yield one line for too few layers for the stages, and for heads and experts that ranks cannot share;
    megatron-core (`cores`) keeps experts whole where it cuts the rest of a layer, and has its own families.
    """
    sizes = _sizes(model)
    where = f"{key}.path={model.path}"
    refusal = family_refusal(str(sizes["model_type"])) if cores and "model_type" in sizes else None
    if refusal is not None:
        yield f"{where}: {refusal}"
    yield from _heads(sizes, fsdp.tensor_parallel_size, "fsdp_config.tensor_parallel_size", key, model)
    layers = sizes.get("num_hidden_layers")
    parts = fsdp.pipeline_parallel_size * fsdp.virtual_pipeline_parallel_size
    if parts > 1 and isinstance(layers, int) and layers < parts:
        yield (
            f"{where} has {layers} layers, which make no {parts} parts: set "
            f"fsdp_config.pipeline_parallel_size × virtual_pipeline_parallel_size to at most {layers}"
        )
    if sizes.get("vision_config") and fsdp.tensor_parallel_size > 1:
        yield (
            f"{where} reads pictures, and only models of text are cut by fsdp_config.tensor_parallel_size="
            f"{fsdp.tensor_parallel_size}: set it to 1"
        )
    ranks = fsdp.expert_parallel_size
    experts = next((sizes[name] for name in NUMBERS_OF_EXPERTS if sizes.get(name)), 0)
    if model.quantization and (experts or sizes.get("vision_config")):
        what = f"has {experts} experts" if experts else "reads pictures"
        yield (
            f"{where} {what}, and only dense models of text are held in 4 bits: leave {key}.quantization="
            f"{model.quantization} out"
        )
    if experts and ranks == 1 and fsdp.tensor_parallel_size > 1 and not cores:
        yield (
            f"{where} has {experts} experts, which are not cut by fsdp_config.tensor_parallel_size="
            f"{fsdp.tensor_parallel_size}: let its ranks share them by fsdp_config.expert_parallel_size of 2 "
            "or more"
        )
    if ranks > 1 and isinstance(experts, int) and (not experts or experts % ranks):
        yield (
            f"{where} has {experts or 'no'} experts, which fsdp_config.expert_parallel_size={ranks} does not "
            "divide: set a divisor, or 1 for a dense model"
        )


def _heads(sizes: Mapping[str, Any], ranks: int, key: str, block: str, model: ModelConfig) -> Iterator[str]:
    """Yield one line where ranks of tensor parallelism cannot share the heads of attention."""
    heads = {name: sizes[name] for name in NUMBERS_OF_HEADS if isinstance(sizes.get(name), int)}
    wrong = [f"{name}={number}" for name, number in heads.items() if number % ranks]
    if wrong:
        common = math.gcd(*heads.values())
        divisors = [str(number) for number in range(1, common + 1) if common % number == 0]
        yield (
            f"{key}={ranks} does not divide {', '.join(wrong)} of {block}.path={model.path}; set it to "
            f"{' or '.join(divisors)}"
        )


def _sizes(model: ModelConfig) -> Mapping[str, Any]:
    """Return the sizes of a model by its config.json and override_config; none where it is not here."""
    content = None
    if model.path and not is_remote(model.path):
        content = _read_json(local(model.path) / "config.json")
    if not isinstance(content, dict):
        return {}
    inner = content.get("text_config")
    sizes = inner if isinstance(inner, dict) else content
    return {"vision_config": content.get("vision_config"), **sizes, **model.override_config}


def model_problem(model: ModelConfig, key: str, told: str | None = None) -> Iterator[str]:
    """Yield one line where a role's model is not set, names a missing local folder, or cannot be loaded.

    `told` is a folder that was checked before.
    """
    if not model.path:
        yield (
            f"{key}.path is not set: give a Hugging Face folder or a hub name, for example "
            f"{key}.path={EXAMPLE}"
        )
    elif is_missing_folder(model.path):
        yield f"{key}.path: there is no folder {model.path}"
    else:
        yield from _folder(model, key)
    tokenizer = model.tokenizer_path
    if tokenizer and tokenizer not in (model.path, told) and is_missing_folder(tokenizer):
        yield f"{key}.tokenizer_path: there is no folder {model.tokenizer_path}"


def _judge(learned: RewardModelRoleConfig) -> Iterator[str]:
    """Yield one line for each thing that a generative reward model lacks, as far as its folder shows it."""
    model = learned.model
    if not model.path or is_remote(model.path) or not local(model.path).is_dir():
        return
    block = "reward.reward_model.model"
    key = "reward.reward_model.rollout.tensor_model_parallel_size"
    yield from _heads(_sizes(model), learned.rollout.tensor_model_parallel_size, key, block, model)
    content = _read_json(local(model.path) / "config.json")
    heads = content.get("architectures") if isinstance(content, dict) else None
    if heads and all(str(name).endswith("Classification") for name in heads):
        yield (
            f"{block}.path={model.path} is a classifier ({', '.join(map(str, heads))}), which writes no "
            "verdict: set reward.reward_model.kind=score or token_score, or name a causal LM"
        )
    folder = local(model.tokenizer_path or model.path)
    if folder.is_dir() and not has_chat_template(folder):
        yield (
            f"{block}: the tokenizer {folder} has no chat template, so the judge cannot be asked: set "
            f"{block}.tokenizer_path to one that has"
        )


def is_missing_folder(path: str) -> bool:
    """Return whether a path is written as a local one and is not there; any other may be a hub name."""
    if is_remote(path) or local(path).exists():
        return False
    return is_written_as_path(path)


def _folder(model: ModelConfig, key: str) -> Iterator[str]:
    assert model.path, "it was looked at before"
    folder = local(model.path)
    if is_remote(model.path) or not folder.exists():
        return
    if not folder.is_dir():
        yield f"{key}.path={model.path} is a file: give the Hugging Face folder that holds it"
        return
    yield from _config_file(folder, model, key)


def _config_file(folder: Path, model: ModelConfig, key: str) -> Iterator[str]:
    where = f"{key}.path={model.path}"
    if not (folder / "config.json").is_file():
        yield (
            f"{where} has no config.json: give a Hugging Face model folder (this one holds "
            f"{_listing(folder)})"
        )
        return
    content = _read_json(folder / "config.json")
    if not isinstance(content, dict):
        yield f"{where}: config.json is no JSON object; download it again, or write it with save_pretrained"
    elif "model_type" not in content and "auto_map" not in content:
        yield f"{where}: config.json has no model_type, so its architecture is not known"


def weight_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each model folder here that lacks weights."""
    built = [(block, model) for block, model, _ in built_models(config)]
    built += _named_teachers(config)
    for path, block in {model.path: block for block, model in reversed(built)}.items():
        if path and not is_remote(path) and local(path).is_dir():
            yield from _weights(local(path), f"{block}.path={path}")


def _weights(folder: Path, where: str) -> Iterator[str]:
    files = {path.name for path in folder.glob("*.safetensors")}
    index = _read_json(folder / INDEX) if (folder / INDEX).is_file() else {}
    wanted = index.get("weight_map", {}) if isinstance(index, dict) else {}
    missing = sorted({str(name) for name in wanted.values()} - files) if isinstance(wanted, dict) else []
    if not files:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        hint = f"this folder holds {_listing(folder)}"
        if pickles:
            hint = f"{pickles[0]} is a pickle, which is never loaded: convert it to safetensors"
        yield f"{where} has no weights, that is no *.safetensors: {hint}"
    elif missing:
        yield (
            f"{where} lacks {len(missing)} of the weight files that {INDEX} names, the first is "
            f"{missing[0]}: download the folder again"
        )


def _listing(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return ", ".join(names[:6] + ["…"] * (len(names) > 6)) or "nothing"


def _read_json(path: Path) -> Any:
    """The content of a JSON file; None where it is not readable as JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def tokenizer_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line where data.tokenizer is a local folder that lacks a tokenizer or a chat template."""
    path = config.data.tokenizer
    if not path or is_remote(path):
        return
    folder = local(path)
    model = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    if path != model.path and is_missing_folder(path):
        yield f"data.tokenizer: there is no folder {path}"
    if not folder.is_dir():
        return
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield (
            f"data.tokenizer={path} holds no tokenizer, that is none of {', '.join(TOKENIZER_FILES)}: set "
            "data.tokenizer to the folder or the hub name of one"
        )
    elif not has_chat_template(folder) and _holds_messages(config):
        yield (
            f"data.tokenizer={path} has no chat template, and the data holds messages: set data.tokenizer "
            "to a chat model's tokenizer, put a chat_template.jinja into the folder, or give prompts as "
            "texts that are already templated"
        )


def has_chat_template(folder: Path) -> bool:
    """Return whether a tokenizer's folder holds a chat template, as a file or in its configuration."""
    if any((folder / name).exists() for name in TEMPLATE_FILES):
        return True
    content = _read_json(folder / "tokenizer_config.json")
    return isinstance(content, dict) and bool(content.get("chat_template"))


def _holds_messages(config: PPOConfig | SFTConfig) -> bool:
    """Whether the prompts are messages, as those of built-in tasks are; of a file the first row decides."""
    if config.data.task.name:
        return ":" not in config.data.task.name or config.data.task.name.startswith(
            ("reasoning_gym:", "environment:")
        )
    if isinstance(config, PPOConfig) and config.data.custom_cls.path:
        return False
    columns = [config.data.prompt_key]
    if isinstance(config, SFTConfig):
        columns = [config.data.messages_key, *columns]
    row = first_row(config.data.train_files)
    prompt = next((row[column] for column in columns if column in row), "")
    return isinstance(prompt, list)


def picture_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the first row of the data has pictures, and the run would read its text alone."""
    data = config.data
    reason = reads_text_alone(config)
    if reason is None or data.custom_cls.path:
        return
    if data.task.name == "red_squares":
        yield f"data.task.name=red_squares makes pictures, and {reason}"
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        row = first_row(files)
        if any(row.get(column) for column in (data.image_key, data.video_key) if column):
            yield f"{key} has pictures, and {reason}"


def kernel_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each model with use_liger=true that ranks of tensor parallelism share."""
    for block, model, fsdp in built_models(config):
        if model.use_liger and fsdp is not None and fsdp.tensor_parallel_size > 1:
            yield (
                f"{block}.use_liger=true with tensor_parallel_size={fsdp.tensor_parallel_size}: layers that "
                "are split among ranks have torch's own kernels: leave use_liger out, or set "
                "tensor_parallel_size=1"
            )
