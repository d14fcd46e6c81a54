"""A tiny model in a folder, with another set of weights to push, and what transformers makes of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.vllm.build import build_vllm_engine
from hybridflow.rollout.vllm.engine import VLLMEngine

VOCABULARY = 96
EOS = 2


def tiny(seed: int, *, tied: bool = True, kind: str = "qwen2") -> LlamaForCausalLM | Qwen2ForCausalLM:
    """Random weights, large enough that attention matters."""
    config = (Qwen2Config if kind == "qwen2" else LlamaConfig)(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return (Qwen2ForCausalLM if kind == "qwen2" else LlamaForCausalLM)(config).eval()


def save(folder: Path, hf: LlamaForCausalLM | Qwen2ForCausalLM) -> str:
    """A Hugging Face folder with a tokenizer whose token number n is the text "wn "."""
    hf.save_pretrained(folder)
    words = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{number}": number for number in range(3, VOCABULARY)}
    inner = Tokenizer(WordLevel(words, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return str(folder)


def prompts(count: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Random prompts of 1 to 40 tokens."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 41, (count,), generator=draw).tolist()
    return [tuple(torch.randint(3, VOCABULARY, (length,), generator=draw).tolist()) for length in lengths]


def requests_for(token_ids: Sequence[tuple[int, ...]], **params: object) -> list[GenerationRequest]:
    sampling = SamplingParams(**{"max_tokens": 24, **params})  # type: ignore[arg-type]
    return [
        GenerationRequest(number, Prompt(prompt), sampling, seed=1000 + number)
        for number, prompt in enumerate(token_ids)
    ]


def weights(hf: LlamaForCausalLM | Qwen2ForCausalLM) -> list[tuple[str, Tensor]]:
    """All weights by the names of files, the tied head under its own name too."""
    return [(name, tensor.detach()) for name, tensor in hf.state_dict().items()]


@torch.no_grad()
def greedy(hf: LlamaForCausalLM | Qwen2ForCausalLM, prompt: tuple[int, ...], count: int = 24) -> list[int]:
    """transformers' own, one row at a time, with the end token."""
    out = hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=count,
        do_sample=False,
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def log_probs(
    hf: LlamaForCausalLM | Qwen2ForCausalLM,
    prompt: Sequence[int],
    response: Sequence[int],
    temperature: float,
) -> Tensor:
    """Of the response's tokens, at the temperature alone [R]."""
    logits = hf(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def build(folder: str, *, server: bool) -> VLLMEngine:
    """With the weights of no model."""
    config = RolloutConfig(name="vllm", max_model_len=128, max_num_seqs=64)
    config = replace(config, server=replace(config.server, enable=server, start_timeout=300, push_timeout=60))
    return build_vllm_engine(config, ModelFacts(folder, torch.device("cpu"), "float32"), [EOS])


PROMPTS = prompts(64)
TOLERANCE = 1e-4


def run(engine: PushedEngine, **sampling: Any) -> list[GenerationOutput]:
    """The outputs of PROMPTS, in their order."""
    found = {output.request_id: output for output in engine.generate(requests_for(PROMPTS, **sampling))}
    return [found[number] for number in range(len(PROMPTS))]


def furthest(hf: Any, outputs: list[GenerationOutput], temperature: float = 1.0) -> float:
    """How far log-probs are from transformers' at most."""
    apart = [
        (torch.tensor(output.log_probs) - log_probs(hf, prompt, output.token_ids, temperature)).abs().max()
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    return float(torch.stack(apart).max())


def check_spoilt_pushes(engine: PushedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A push that does not come, breaks off, or lacks a weight is found, and a whole one mends it."""
    engine.update_weights(weights(tiny(0)), 6)
    with monkeypatch.context() as dropping:
        dropping.setattr(engine.runner, "push", lambda weights, version: None)
        with pytest.raises(RolloutError, match="which says it has version 6"):
            engine.update_weights(weights(tiny(1)), 7)
    assert engine.policy_version == 6

    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from weights(tiny(1))[:5]
        raise RolloutError("the sender broke")

    with pytest.raises(RolloutError):
        engine.update_weights(broken(), 7)
    assert engine.policy_version == -1
    with pytest.raises(RolloutError, match="only a part of a push came"):
        list(engine.generate(requests_for(PROMPTS[:1])))
    with pytest.raises(RolloutError, match="tensors that an earlier push had are not in this one"):
        engine.update_weights(weights(tiny(1))[:-1], 7)
    hf = tiny(1)
    engine.update_weights(weights(hf), 8)
    assert furthest(hf, run(engine, greedy=True)) < TOLERANCE
