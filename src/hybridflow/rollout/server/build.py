"""Build the service of a server from its settings: the model, its tokenizer, and an engine with a thread for
each device.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from hybridflow.config.data import BaseDataConfig
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer, text_of
from hybridflow.distributed.accelerators import GPU, features
from hybridflow.distributed.device import num_devices, resolve_device
from hybridflow.errors import ConfigError
from hybridflow.models.attention.rope import longest_generated
from hybridflow.models.copies.quantized_copy import QuantizedCopy
from hybridflow.models.files.build import build_policy, generation_end_tokens, resolve_dtype
from hybridflow.rollout.client import EngineReplica, LLMClient
from hybridflow.rollout.native.drafts import DraftSettings
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.server.model import ServedModel
from hybridflow.rollout.server.service import ServerLimits, Service
from hybridflow.tools.parsers import TOOL_PARSERS, parser_of_template

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServeSettings:
    """Settings of `hybridflow serve`."""

    model: str
    """A Hugging Face folder or a hub name."""
    name: str
    """Name of the model in requests."""
    devices: tuple[str, ...] = ("cpu",)
    """Devices; each has an engine with its own weights."""
    dtype: str = "auto"
    max_num_seqs: int = 256
    """Most rows that an engine decodes together."""
    max_num_batched_tokens: int = 8192
    memory_share: float = 0.25
    """Share of the memory that is free at the start, for the keys and values of running rows and of earlier
    ones that prompts may continue.
    """
    prefix_caching: bool = True
    speculate: bool = False
    """Draft tokens from a prompt and its answers, and verify them in one pass."""
    quantization: str | None = None
    """Kind to which weights are quantized, int8, fp8 or float16; None: they stay as they are."""
    max_model_len: int | None = None
    """Most tokens of prompt and response together; None: the model's positions."""
    tool_parser: str | None = None
    """Name of the parser of tool calls; None: found by the chat template."""
    chat_template: Path | None = None
    trust_remote_code: bool = False
    fetch_media: bool = False
    """Fetch pictures that requests name by an http address."""
    limits: ServerLimits = field(default_factory=ServerLimits)


def build_service(settings: ServeSettings) -> Service:
    """Load the model and start the engines; ModelError or ConfigError where one of them is wrong."""
    tokenizer = load_tokenizer(settings.model, settings.trust_remote_code)
    template = _chat_template(settings, tokenizer)
    parser = settings.tool_parser or parser_of_template(template or "")
    if parser is not None and parser not in TOOL_PARSERS:
        raise ConfigError(
            f"--tool-call-parser {parser}: there is none of that name, only {', '.join(TOOL_PARSERS)}"
        )
    ends = generation_end_tokens(settings.model, trust_remote_code=settings.trust_remote_code)
    engines = [_engine(settings, device, ends, tokenizer) for device in settings.devices]
    policy = engines[0].policy
    positions = longest_generated(policy.config)
    longest = settings.max_model_len or positions
    if longest is None or (positions is not None and longest > positions):
        raise ConfigError(
            f"--max-model-len {settings.max_model_len}: the model has {positions or 'no number of'} "
            "positions; give a number up to that"
        )
    reader = None
    if policy.vision is not None:
        from hybridflow.data.media import MediaReader  # its image processors take seconds to import

        data = BaseDataConfig(fetch_media=settings.fetch_media, trust_remote_code=settings.trust_remote_code)
        reader = MediaReader.of_model(tokenizer, data)
    model = ServedModel(
        settings.name,
        tokenizer,
        vocabulary=policy.head.weight.shape[0],
        max_model_len=longest,
        tool_parser=parser,
        chat_template=template if settings.chat_template else None,
        reader=reader,
    )
    client = LLMClient(
        [
            EngineReplica(engine, name=f"native-{place}", device=engine.model.device)
            for place, engine in enumerate(engines)
        ]
    )
    calls = f"tool calls are read as {parser} writes them"
    if parser is None:
        calls = "tool calls are not parsed (--tool-call-parser names how the model writes them)"
    logger.info("serving %s: %d tokens of context, %s", settings.name, longest, calls)
    return Service(client, model, settings.limits)


def _engine(settings: ServeSettings, device: str, ends: list[int], tokenizer: Tokenizer) -> NativeEngine:
    quantizes = settings.quantization is not None
    target = served_device(device)
    policy = build_policy(
        settings.model,
        device="cpu" if quantizes else target,  # the device has quantized weights only
        dtype=str(resolve_dtype(settings.dtype, target)).removeprefix("torch."),
        trust_remote_code=settings.trust_remote_code,
    )
    policy.requires_grad_(False)
    quantized = None
    if settings.quantization is not None:
        quantized = QuantizedCopy(policy, settings.quantization, device=target, key="--quantization")
    return NativeEngine(
        policy,
        eos_token_ids=ends,
        decode=partial(text_of, tokenizer),  # special tokens too: one of them may be a stop text
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        gpu_memory_utilization=settings.memory_share,
        enable_prefix_caching=settings.prefix_caching,
        quantized=quantized,
        drafts=DraftSettings() if settings.speculate else None,
    )


def served_device(text: str) -> torch.device:
    """Return the device that `--device` names: a device of the table of accelerators, or `npu:1`.

    Raises ConfigError for an unknown name, and for a device that is not here.
    """
    name, colon, number = text.partition(":")
    index = 0
    if colon:
        if not number.isdecimal():
            raise ConfigError(f"--device {text}: give a device and perhaps its number, for example {GPU}:1")
        index = int(number)
    try:
        device = resolve_device(name)
    except ConfigError as error:
        raise ConfigError(str(error).replace("trainer.device", "--device")) from error
    if device.type == "cpu":
        return device
    count = num_devices(device.type)
    if index >= count:
        raise ConfigError(
            f"--device {text}: this machine shows {count} {features(device.type).name}s, counted from 0"
        )
    return torch.device(device.type, index)


def _chat_template(settings: ServeSettings, tokenizer: Tokenizer) -> str | None:
    """Return the template that was given, else the tokenizer's."""
    if settings.chat_template is not None:
        try:
            return settings.chat_template.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {settings.chat_template} cannot be read: {error}") from error
    own = getattr(tokenizer, "chat_template", None)
    return json.dumps(own) if isinstance(own, dict) else own
