"""Load a model from a Hugging Face folder or hub name, and check it before it is used."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from hybridflow.config.model import ModelConfig
from hybridflow.data.plugin import load_module
from hybridflow.data.remote import hub_folder, require_hub
from hybridflow.distributed.accelerators import features
from hybridflow.errors import ModelError
from hybridflow.models.attention.rope import describe_rope, length_limit, longest_generated
from hybridflow.models.experts.layers import num_experts
from hybridflow.models.files.override import apply_override, effective_override
from hybridflow.models.files.probe import probe_policy
from hybridflow.models.files.progress import without_progress_bars
from hybridflow.models.float64 import recompute_in_float64
from hybridflow.models.liger import patch_liger, use_liger_kernels
from hybridflow.models.policy import PolicyModel, check_attention
from hybridflow.models.score import ScoreModel, head_name
from hybridflow.models.value import HEAD_NAMES, ValueModel, is_head
from hybridflow.models.vision import language_class

logger = logging.getLogger(__name__)

_FILE_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


Kind = Literal["policy", "value", "score", "token_score"]
AUTO_CLASSES: dict[Kind, Any] = {
    "policy": AutoModelForCausalLM,
    "value": AutoModelForCausalLM,
    "score": AutoModelForSequenceClassification,
    "token_score": AutoModelForTokenClassification,
}
"""The class of transformers that reads a model of text of each kind; `auto_class` knows all models."""


def auto_class(kind: Kind, config: PretrainedConfig) -> Any:
    """Return the class of transformers that reads the model of a configuration as `kind`.

    ModelError where it reads pictures in a way that is not known here.
    """
    if is_classifier(kind, config):
        return AUTO_CLASSES["token_score" if kind == "value" else kind]
    return language_class(config)


def is_classifier(kind: Kind, config: PretrainedConfig) -> bool:
    """Return whether a configuration is read as a classifier: for a reward model, and for a critic if it is
    that of a token classifier, as a merged critic's is.
    """
    if kind == "value":
        return "TokenClassification" in "".join(config.architectures or ())
    return kind != "policy"


def token_classifier(folder: str | Path, trust_remote_code: bool) -> tuple[str, str, str]:
    """Return the class of the token classifier over the model of a folder, and what its files call backbone
    and head.
    """
    config = load_config(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        hf = AutoModelForTokenClassification.from_config(config, trust_remote_code=trust_remote_code)
    return type(hf).__name__, str(hf.base_model_prefix), head_name(hf)


def wrap(kind: Kind, hf: PreTrainedModel) -> PolicyModel | ValueModel:
    """Return the module of a kind around a model of transformers; a reward model is a ValueModel too."""
    if kind == "policy":
        return PolicyModel(hf)
    if kind == "value":
        return ValueModel(hf)
    return ScoreModel(hf, of_rows=kind == "score")


def build_policy(
    path: str | Path,
    *,
    device: torch.device | str,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    override_config: dict[str, Any] | None = None,
    gradient_checkpointing: bool = False,
    use_liger: bool = False,
    probe: bool = True,
) -> PolicyModel:
    """Load a causal LM as a policy on `device`; `dtype` auto is float32 on CPU and bfloat16 on CUDA.

    `probe` compares its log-probs with plain attention once, and refuses an architecture that would compute
    otherwise here. With `use_liger` some layers use Liger's kernels, which run on CUDA only. Raises
    ModelError that names what the folder lacks, or the reason the architecture cannot be used.
    """
    hf = load_whole(path, device, resolve_dtype(dtype, device), trust_remote_code, override_config)
    policy = PolicyModel(hf)
    settle_policy(policy, use_liger, probe)
    if gradient_checkpointing:
        enable_gradient_checkpointing(hf)
    return policy


def settle_policy(policy: PolicyModel, use_liger: bool, probe: bool) -> None:
    """Put Liger's kernels into a whole model if asked, and probe it."""
    if use_liger and probe:
        use_liger_kernels(policy)
    elif use_liger:
        patch_liger(policy.hf)
    if probe:
        probe_policy(policy)


def load_config(
    path: str | Path, *, trust_remote_code: bool = False, override_config: dict[str, Any] | None = None
) -> PretrainedConfig:
    """Return the model's configuration with `override_config` merged in.

    Raises ModelError where there is none, where it cannot be read, and for an override that does not fit.
    """
    path = hub_folder(str(path))
    folder = Path(path).expanduser()
    if folder.is_dir():
        path = str(folder)
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"model folder {folder} has no config.json: give a Hugging Face model folder (found: "
                f"{_listing(folder)})"
            )
    elif folder.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelError(
            f"model path {path!r} is no folder: give a Hugging Face model folder or a hub name such as "
            "Qwen/Qwen2.5-0.5B-Instruct"
        )
    else:
        require_hub(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        where = " (there is no such folder here, so it was taken as a hub name)"
        if folder.is_dir():
            where = ""
        raise ModelError(
            f"cannot read the configuration of model {path!r}{where}: {_first_lines(error)}"
        ) from error
    apply_override(config, override_config or {})
    return config


def override_in_full(
    path: str | Path, trust_remote_code: bool, override_config: dict[str, Any] | None
) -> dict[str, Any] | None:
    """Return `override_config` for an engine that reads the model itself: its rotary settings complete, under
    transformers 5's name; None where nothing is overridden. Raises ModelError as `load_config` does.
    """
    if not override_config:
        return None
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    return effective_override(config, override_config)


def shape_of(config: ModelConfig) -> PretrainedConfig:
    """Return the Hugging Face configuration of a role's model; ModelError as `load_config`."""
    import_external(config)
    return load_config(
        str(config.path), trust_remote_code=config.trust_remote_code, override_config=config.override_config
    )


def import_external(config: ModelConfig) -> None:
    """Import `external_lib`, which may register the architecture; ConfigError where that fails."""
    if config.external_lib:
        load_module(config.external_lib, key="model.external_lib")


def generation_end_tokens(path: str | Path, *, trust_remote_code: bool = False) -> list[int]:
    """Return the end tokens of a model's generation_config.json, else of its config.json."""
    where = hub_folder(str(path))
    try:
        ends = GenerationConfig.from_pretrained(where).eos_token_id
    except OSError:
        ends = load_config(path, trust_remote_code=trust_remote_code).get_text_config().eos_token_id
    if not isinstance(ends, list):
        ends = [ends]
    return [int(token) for token in ends if token is not None]


def count_parameters(config: PretrainedConfig, *, trust_remote_code: bool = False) -> int:
    """Count the parameters of the causal LM that `config` describes, shared ones once, without allocating."""
    with torch.device("meta"):
        hf = auto_class("policy", config).from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in hf.parameters())


def resolve_dtype(dtype: str, device: torch.device | str) -> torch.dtype:
    """Return the torch dtype of a name; `auto` is float32 on CPU and bfloat16 elsewhere.

    Half precision is 60 times slower on a CPU.
    """
    if dtype == "auto":
        dtype = features(torch.device(device).type).dtype
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r} is not supported: use auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def enable_gradient_checkpointing(hf: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass instead of keeping activations (in training mode)."""
    settings: dict[str, Any] = {"use_reentrant": False}
    if hf.dtype == torch.float64:
        settings["context_fn"] = recompute_in_float64
    # transformers 5.23 has another name for it, and warns of the old one
    enable = getattr(hf, "activation_checkpointing_enable", hf.gradient_checkpointing_enable)
    enable(settings)


def checked_config(
    path: str | Path,
    *,
    trust_remote_code: bool,
    override_config: dict[str, Any] | None,
    kind: Kind = "policy",
) -> tuple[PretrainedConfig, str]:
    """Return the configuration of a model whose weights can be read as `kind`, and its folder or hub name.

    A reward model that begins from a language model has one label. Raises ModelError that says what is wrong.
    """
    config = load_config(path, trust_remote_code=trust_remote_code, override_config=override_config)
    for reader, meant in (
        (auto_class("policy", config), "causal language model"),
        (auto_class(kind, config), "classifier"),
    ):
        if type(config) not in reader._model_mapping and reader.__name__ not in (
            getattr(config, "auto_map", None) or {}
        ):
            raise ModelError(
                f"model {path!r} has model_type {config.model_type!r}, which is no {meant} of transformers "
                f"({reader.__name__})"
            )
    if type(config) in auto_class("policy", config)._model_mapping:  # other classes come with their code
        check_attention(auto_class("policy", config)._model_mapping[type(config)], config)
    architecture = "".join(config.architectures or ())
    if kind in ("score", "token_score") and "Classification" not in architecture:
        config.num_labels = 1
    if kind == "value" and is_classifier(kind, config) and config.num_labels != 1:
        raise ModelError(
            f"model {path!r} is a token classifier with {config.num_labels} labels, and a critic has one, "
            "the value: give a language model, whose critic begins at 0, or a critic that `hybridflow merge` "
            "wrote"
        )
    path = hub_folder(str(path))
    folder = Path(path).expanduser()
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        hint = f" (found: {_listing(folder)})"
        for pickle in folder.glob("*.bin"):
            hint = f"; {pickle.name} is a pickle, which is never loaded: convert it to safetensors"
        raise ModelError(f"model folder {folder} has no weights: *.safetensors is missing{hint}")
    if folder.is_dir():
        path = str(folder)
    return config, path


def load_whole(
    path: str | Path,
    device: torch.device | str,
    dtype: torch.dtype,
    trust_remote_code: bool,
    override_config: dict[str, Any] | None,
    kind: Kind = "policy",
) -> PreTrainedModel:
    """Load a model with all of its weights on `device`, without dropout and with eager attention.

    Errors are those of `build_policy`.
    """
    config, where = checked_config(
        path, trust_remote_code=trust_remote_code, override_config=override_config, kind=kind
    )
    before = source_dtype(config, where)
    try:
        with without_progress_bars():
            loaded: Any = auto_class(kind, config).from_pretrained(
                where,
                config=config,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                attn_implementation="eager",
                output_loading_info=True,
                key_mapping=_head_names(kind, config, trust_remote_code),
            )
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"cannot load model {path!r}: {_first_lines(error)}") from error
    hf, info = loaded
    missing = set(info["missing_keys"])
    if is_classifier(kind, config):
        missing = _with_head(hf, missing, set(info["unexpected_keys"]), path)
    elif kind == "value":  # the head of the language model is left behind
        missing = {name for name in missing if not name.startswith("lm_head.")}
    if missing:
        raise ModelError(
            f"model {path!r} lacks {len(missing)} weights its configuration asks for, the first "
            f"{min(missing)!r}: they would be random"
        )
    if info.get("mismatched_keys"):
        raise ModelError(
            f"model {path!r}: weights of another shape than its configuration says: "
            f"{sorted(info['mismatched_keys'])[:3]}"
        )
    without_dropout(hf)
    logger.info("%s: %s", type(hf).__name__, describe_model(hf.config, dtype))
    hf.source_dtype = before
    model: PreTrainedModel = hf.to(device)
    return model


def describe_model(config: PretrainedConfig, dtype: torch.dtype) -> str:
    """Return attention, rotary settings, positions, dtype and experts of a model of `config` as a text."""
    text = config.get_text_config()
    parts = ["attention over packed rows by PyTorch's kernels"]
    windows = (getattr(text, "layer_types", None) or []).count("sliding_attention")
    if windows and getattr(text, "sliding_window", None):
        parts[0] += f", in {windows} of {text.num_hidden_layers} layers over {text.sliding_window} tokens"
    parts.append(f"rope {describe_rope(config)}")
    longest = longest_generated(config)
    if longest is not None:
        parts.append(f"rows of up to {longest} tokens are generated")
    limit = length_limit(config)
    if limit is not None:
        parts.append(f"longer rows than {limit} tokens have rotary frequencies of their own")
    parts.append(f"dtype {str(dtype).removeprefix('torch.')}")
    if num_experts(config):
        parts.append(f"experts by {getattr(text, '_experts_implementation', None) or 'grouped_mm'}")
    return "; ".join(parts)


def load_saved(folder: Path) -> PreTrainedModel:
    """Load a model that a run has written, as its users would: a classifier where it is one.

    Raises ModelError where it cannot be loaded.
    """
    config = load_config(str(folder))
    architecture = "".join(config.architectures or ())
    kinds: dict[str, Kind] = {"SequenceClassification": "score", "TokenClassification": "token_score"}
    kind: Kind = next((kind for ending, kind in kinds.items() if ending in architecture), "policy")
    try:
        with without_progress_bars():
            model: PreTrainedModel = auto_class(kind, config).from_pretrained(folder, use_safetensors=True)
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"cannot load model {str(folder)!r}: {_first_lines(error)}") from error
    return model


def _head_names(kind: Kind, config: PretrainedConfig, trust_remote_code: bool) -> dict[str, str] | None:
    """Return other names that a head may have in files, as expressions, with its own; None without a head."""
    if not is_classifier(kind, config):
        return None
    with torch.device("meta"):
        hf = auto_class(kind, config).from_config(config, trust_remote_code=trust_remote_code)
    own = head_name(hf)
    return {rf"^{re.escape(name)}\.(weight|bias)$": rf"{own}.\1" for name in HEAD_NAMES if name != own}


def _with_head(hf: Any, missing: set[str], unexpected: set[str], path: str | Path) -> set[str]:
    """Make a head that no file has a new one, whose scores are 0; return what else is missing.

    Raises ModelError for a part of a head that this architecture has no place for.
    """
    refuse_odd_head(hf, unexpected, path)
    head = hf.get_submodule(head_name(hf))
    hf._weight_conversions = None  # it is exported by its own names, not by those of this folder
    hf.new_head = f"{head_name(hf)}.weight" in missing
    if not hf.new_head:
        for parameter in head.parameters():
            # parameters lie where the file has them, and the bits of a sum for one output depend on the place
            parameter.data = parameter.data.clone()
        return missing
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return {name for name in missing if not is_head(name)}


def refuse_odd_head(hf: PreTrainedModel, unread: Iterable[str], path: str | Path) -> None:
    """Raise ModelError where one of the tensors of the files that nothing reads is a part of a head."""
    odd = sorted(filter(is_head, unread))
    if odd:
        raise ModelError(
            f"model {str(path)!r} has {odd[0]} in its files, which {type(hf).__name__} has no place for: its "
            "scores would be others. Export it as a classifier of transformers"
        )


def source_dtype(config: PretrainedConfig, where: str) -> torch.dtype | None:
    """Return the dtype of a model's weights by its configuration, else by its first file, or None."""
    said = config.dtype or config.get_text_config().dtype
    if isinstance(said, torch.dtype):
        return said
    sizes: Counter[torch.dtype] = Counter()
    for file in sorted(Path(where).glob("*.safetensors"))[:1]:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  (no mapping)
                part = weights.get_slice(name)
                sizes[getattr(torch, _FILE_DTYPES.get(part.get_dtype(), "uint8"))] += math.prod(
                    part.get_shape()
                )
    return max(sizes, key=lambda each: sizes[each], default=None)


def without_dropout(hf: PreTrainedModel) -> None:
    """Switch dropout off, which would make the log-probs of training differ from those of rollout."""
    names = {
        name
        for name in vars(hf.config)
        if name.endswith(("dropout", "pdrop", "drop")) and isinstance(getattr(hf.config, name), float)
    }
    active = sorted(name for name in names if getattr(hf.config, name))
    for module in hf.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    for name in active:
        setattr(hf.config, name, 0.0)
    if active:
        logger.info(
            "dropout of the model (%s) is set to 0: policy-gradient ratios need reproducible log-probs",
            ", ".join(active),
        )


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    if not names:
        return "an empty folder"
    if len(names) > 8:
        names = [*names[:7], names[7] + " …"]
    return ", ".join(names)


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
