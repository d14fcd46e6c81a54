"""SGLang's server: what transformers computes, with weights that were pushed, and what happens when they do not come."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_models import EOS, greedy, log_probs, prompts, requests_for, tiny, weights

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.sglang.build import build_sglang_engine
from hybridflow.rollout.sglang.engine import SGLangEngine
from hybridflow.rollout.sglang.server import Server

PROMPTS = prompts(64)
TOLERANCE = 1e-4


def run(engine: SGLangEngine, **sampling: Any) -> list[GenerationOutput]:
    found = {output.request_id: output for output in engine.generate(requests_for(PROMPTS, **sampling))}
    return [found[number] for number in range(len(PROMPTS))]


def furthest(hf: Any, outputs: list[GenerationOutput], temperature: float = 1.0) -> float:
    apart = [
        (torch.tensor(output.log_probs) - log_probs(hf, prompt, output.token_ids, temperature)).abs().max()
        for prompt, output in zip(PROMPTS, outputs, strict=True)
    ]
    return float(torch.stack(apart).max())


@pytest.mark.parametrize(("version", "seed"), [(1, 0), (2, 1)])
def test_greedy_tokens_and_log_probs_are_those_of_transformers_after_each_push(engine: SGLangEngine, version: int, seed: int) -> None:
    hf = tiny(seed)
    engine.update_weights(weights(hf), version)
    outputs = run(engine, greedy=True)
    assert [output.token_ids for output in outputs] == [greedy(hf, prompt) for prompt in PROMPTS]
    assert {number for output in outputs for number in output.policy_versions} == {version}
    assert all((output.stop_reason == EOS) == (output.finish_reason == "stop") for output in outputs)
    assert furthest(hf, outputs) < TOLERANCE


def test_log_probs_are_at_the_temperature_alone_whatever_limits_the_tokens(engine: SGLangEngine) -> None:
    hf = tiny(2)
    engine.update_weights(weights(hf), 3)
    limited = {"top_k": 5, "top_p": 0.6, "min_p": 0.05, "repetition_penalty": 1.3, "min_tokens": 4, "logit_bias": ((7, 3.0),)}
    outputs = run(engine, temperature=0.7, top_log_probs=3, **limited)
    assert furthest(hf, outputs, 0.7) < TOLERANCE and min(len(output.token_ids) for output in outputs) >= 4
    assert all(len(place) == 3 for output in outputs for place in output.top_log_probs or ())
    again = run(engine, temperature=0.7, **limited)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs], "the same seeds"
    alone = list(engine.generate([requests_for(PROMPTS, temperature=0.7, **limited)[5]]))
    assert alone[0].token_ids == outputs[5].token_ids, "in other company"


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_a_server_that_runs_already_takes_weights_too(engine: SGLangEngine, folder: str, transport: Any) -> None:
    assert isinstance(engine.runner, Server)
    config = RolloutConfig(name="sglang", max_model_len=128, max_num_seqs=64)
    config = replace(config, server=replace(config.server, address=engine.runner.address.url, transport=transport))
    other = build_sglang_engine(config, ModelFacts(folder, torch.device("cpu"), "float32"), [EOS], rank=0)
    assert other.runner.process is None
    hf = tiny(3)
    other.update_weights(weights(hf), 4)
    assert furthest(hf, run(other, greedy=True)) < TOLERANCE
    other.close()
    assert engine.policy_version == 4, "its server goes on"


def test_a_push_that_loses_a_weight_or_does_not_come_is_found(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_killed_server_is_named_and_finished_rows_are_kept(engine: SGLangEngine) -> None:
    """Last: afterwards the server is gone."""
    assert isinstance(engine.runner, Server) and engine.runner.process is not None
    engine.update_weights(weights(tiny(1)), 9)
    short, *_ = requests_for(PROMPTS[:1], max_tokens=1)
    longer = requests_for(PROMPTS[:3], max_tokens=80, ignore_eos=True)[1:]
    running = engine.generate([short, *longer])
    kept = next(running)
    os.killpg(engine.runner.process.pid, signal.SIGKILL)
    lost = list(running)
    assert kept.finish_reason == "length" and {output.finish_reason for output in lost} == {"error"} and len(lost) == 2
    assert all(f"sglang server http://127.0.0.1:{engine.runner.address.port} (process" in str(output.error) for output in lost)
    with pytest.raises(RolloutError, match="died"):
        list(engine.generate([short]))
