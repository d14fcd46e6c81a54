"""Conversion of a GGUF file into a Hugging Face folder that trains.

    FILE.gguf ──transformers──► model and tokenizer ──► staged folder ──read back, compared──► TARGET

transformers does the reading, with the package `gguf`: quantised tensors become ordinary ones. What is
written is read back and compared with that reading: tensors bit for bit, tokens of a conversation, and
log-probs on a probe batch.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hybridflow.data.tokenizer import Tokenizer, load_tokenizer, save_tokenizer
from hybridflow.errors import ConfigError, ModelError
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import give_usual_modes
from hybridflow.models.files.probe import probe_log_probs
from hybridflow.models.files.progress import without_progress_bars
from hybridflow.models.policy import PolicyModel

logger = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16", "float16"]
MAGIC = b"GGUF"
"""The first bytes of a GGUF file."""
LARGEST_DIFFERENCE = {"float32": 1e-5, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of a log-prob, in nats, between the reading and the written folder: computed in float32
from equal weights, or from rounded ones.
"""


def import_gguf(source: str | Path, target: str | Path, *, dtype: Dtype = "float32") -> Path:
    """Write the model and the tokenizer of a GGUF file as a Hugging Face folder, and return its path.

    The weights are written in `dtype`; float32 keeps every value that the file's quantisation gives.
    `target` must not exist or be empty. Raises ConfigError where a path cannot be used or the package `gguf`
    is missing, and ModelError where the file is no GGUF model that transformers reads, or where the written
    folder differs from transformers' reading of the file.
    """
    source = Path(source).expanduser()
    target = Path(target).expanduser()
    check_gguf(source, target)
    tokenizer, model = _read(source)
    building = target.parent / f".tmp_{target.name}_{os.getpid()}"
    try:
        building.mkdir(parents=True)
        _write(model, tokenizer, building, dtype)
        worst = _compare(model, tokenizer, building, dtype)
        if target.is_dir():
            target.rmdir()
        os.replace(building, target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {target}: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info(
        "wrote %s from %s: %d tensors as %s, equal to transformers' reading when read back; log-probs differ "
        "by at most %.1g nats",
        target,
        source,
        len(model.state_dict()),
        dtype,
        worst,
    )
    return target


def check_gguf(source: Path, target: Path) -> None:
    """Raise ConfigError or ModelError, without loading torch's models, where an import cannot work."""
    if not source.is_file():
        raise ConfigError(f"{source} is not a file: give the path of a .gguf file")
    with source.open("rb") as file:
        head = file.read(len(MAGIC))
    if head != MAGIC:
        raise ModelError(
            f"{source} is not a GGUF file: it begins with {head!r}, and a GGUF file with {MAGIC!r}"
        )
    if part := re.search(r"-(\d{5})-of-(\d{5})\.gguf$", source.name):
        raise ModelError(
            f"{source} is part {int(part[1])} of {int(part[2])}: transformers reads whole files only. Join "
            "the parts with llama.cpp's `llama-gguf-split --merge` first"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(
            f"target folder {target} exists and is not an empty folder: give the name of a new one"
        )
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"reading GGUF needs the package {' and '.join(missing)}: pip install 'hybridflow[gguf]'"
        )


def _read(source: Path) -> tuple[Tokenizer, PreTrainedModel]:
    try:
        with without_progress_bars():
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
            model = AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.float32
            )
    except Exception as error:  # the library raises many kinds for one fact: the file cannot be read
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ModelError(
            f"transformers cannot read {source}: {reason}; wanted a causal language model of an architecture "
            "whose GGUF files transformers knows, with its tokenizer"
        ) from error
    return tokenizer, model.eval()


def _write(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path, dtype: Dtype) -> None:
    """Write an ordinary folder: transformers itself refuses to save a model that was read from GGUF."""
    values = model.config.to_dict()
    for mark in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        values.pop(mark, None)
    plain = type(model)(type(model.config).from_dict(values))
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    with without_progress_bars():
        plain.to(getattr(torch, dtype)).save_pretrained(folder)
    give_usual_modes(folder)
    save_tokenizer(tokenizer, folder)


def _compare(model: PreTrainedModel, tokenizer: Tokenizer, folder: Path, dtype: Dtype) -> float:
    """Return the largest difference of a log-prob between a reading and what was written of it.

    Raises ModelError where tensors, tokens or log-probs differ.
    """
    again = load_tokenizer(folder)
    text = "What is 2 + 2? Ünïcödé\n\ttabs  and spaces."
    messages = [{"role": "user", "content": text}]
    same = again.encode(text) == tokenizer.encode(text)
    if same and tokenizer.chat_template:
        wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        same = wanted == again.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if not same:
        raise ModelError("the written tokenizer encodes a text otherwise than the one of the GGUF file")
    written = build_policy(folder, device="cpu", dtype="float32")
    tensors = written.hf.state_dict()
    for name, tensor in model.state_dict().items():
        if name not in tensors or not torch.equal(tensors[name], tensor.to(getattr(torch, dtype)).float()):
            raise ModelError(
                f"the written tensor {name} is not the one that transformers reads from the file"
            )
    worst = float((probe_log_probs(written) - probe_log_probs(PolicyModel(model))).abs().max())
    if not worst <= LARGEST_DIFFERENCE[dtype]:
        raise ModelError(
            f"log-probs of the written model differ by {worst:.3g} nats from those of the GGUF file; wanted "
            f"at most {LARGEST_DIFFERENCE[dtype]} nats with {dtype}"
        )
    return worst
