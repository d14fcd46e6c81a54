"""SGLang's server: what transformers computes, with weights that were pushed or did not come."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from vllm_models import (
    EOS,
    PROMPTS,
    TOLERANCE,
    check_spoilt_pushes,
    furthest,
    greedy,
    requests_for,
    run,
    tiny,
    weights,
)

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.remote.runner import EngineDied
from hybridflow.rollout.sglang.engine import SGLangEngine, build_sglang_engine
from hybridflow.rollout.sglang.server import SGLangServer


@pytest.mark.parametrize(("version", "seed"), [(1, 0), (2, 1)])
def test_greedy_tokens_and_log_probs_are_those_of_transformers_after_each_push(
    engine: SGLangEngine, version: int, seed: int
) -> None:
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
    limited = {
        "top_k": 5,
        "top_p": 0.6,
        "min_p": 0.05,
        "repetition_penalty": 1.3,
        "min_tokens": 4,
        "logit_bias": ((7, 3.0),),
    }
    outputs = run(engine, temperature=0.7, top_log_probs=3, **limited)
    assert furthest(hf, outputs, 0.7) < TOLERANCE and min(len(output.token_ids) for output in outputs) >= 4
    assert all(len(place) == 3 for output in outputs for place in output.top_log_probs or ())
    again = run(engine, temperature=0.7, **limited)
    assert [output.token_ids for output in again] == [output.token_ids for output in outputs], (
        "the same seeds"
    )
    alone = list(engine.generate([requests_for(PROMPTS, temperature=0.7, **limited)[5]]))
    assert alone[0].token_ids == outputs[5].token_ids, "in other company"


@pytest.mark.parametrize("transport", ["process_group", "shared_memory"])
def test_a_server_that_runs_already_takes_weights_too(
    engine: SGLangEngine, folder: str, transport: Any
) -> None:
    assert isinstance(engine.runner, SGLangServer)
    config = RolloutConfig(name="sglang", max_model_len=128, max_num_seqs=64)
    config = replace(
        config, server=replace(config.server, address=engine.runner.address.url, transport=transport)
    )
    other = build_sglang_engine(config, ModelFacts(folder, torch.device("cpu"), "float32"), [EOS])
    assert other.runner.process is None
    hf = tiny(3)
    other.update_weights(weights(hf), 4)
    assert furthest(hf, run(other, greedy=True)) < TOLERANCE
    other.close()
    assert engine.policy_version == 4, "its server goes on"


def test_a_push_that_loses_a_weight_or_does_not_come_is_found(
    engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_spoilt_pushes(engine, monkeypatch)


def test_a_killed_server_is_named_and_finished_rows_are_kept(engine: SGLangEngine) -> None:
    """Last: afterwards the server is gone."""
    assert isinstance(engine.runner, SGLangServer) and engine.runner.process is not None
    engine.update_weights(weights(tiny(1)), 9)
    short, *_ = requests_for(PROMPTS[:1], max_tokens=1)
    longer = requests_for(PROMPTS[:3], max_tokens=80, ignore_eos=True)[1:]
    running = engine.generate([short, *longer])
    kept = next(running)
    psutil.Process(engine.runner.process.pid).children()[0].kill()
    name = f"sglang server http://127.0.0.1:{engine.runner.address.port}"
    with pytest.raises(EngineDied, match=f"{name} .process"):
        list(running)
    assert kept.finish_reason == "length"
    with pytest.raises(RolloutError, match="died"):
        list(engine.generate([short]))
