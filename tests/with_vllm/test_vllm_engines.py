"""vLLM in process and as a server: what transformers computes, with weights that were pushed."""

from __future__ import annotations

import random

import numpy as np
import psutil
import pytest
import torch
from vllm_models import (
    EOS,
    PROMPTS,
    TOLERANCE,
    build,
    check_spoilt_pushes,
    furthest,
    greedy,
    requests_for,
    run,
    tiny,
    weights,
)

from hybridflow.errors import RolloutError
from hybridflow.rollout.remote.runner import EngineDied
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.rollout.vllm.server import VLLMServer


@pytest.mark.parametrize(("version", "seed"), [(1, 0), (2, 1)])
def test_greedy_tokens_and_log_probs_are_those_of_transformers_after_each_push(
    engine: VLLMEngine, version: int, seed: int
) -> None:
    hf = tiny(seed)
    engine.update_weights(weights(hf), version)
    outputs = run(engine, greedy=True)
    assert [output.token_ids for output in outputs] == [greedy(hf, prompt) for prompt in PROMPTS]
    assert {number for output in outputs for number in output.policy_versions} == {version}
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
    assert all((output.stop_reason == EOS) == (output.finish_reason == "stop") for output in outputs)
    assert furthest(hf, outputs) < TOLERANCE


def test_log_probs_are_at_the_temperature_alone_whatever_limits_the_tokens(engine: VLLMEngine) -> None:
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


def test_texts_and_tokens_stop(engine: VLLMEngine) -> None:
    engine.update_weights(weights(tiny(2)), 4)
    by_text, by_token = (
        run(engine, stop=("w7", "w9"), max_tokens=60),
        run(engine, stop_token_ids=(40, 41), ignore_eos=True, max_tokens=60),
    )
    ended = [output for output in by_text if output.stop_reason in ("w7", "w9")]
    assert ended and all(str(output.token_ids[-1])[0] in "79" for output in ended)
    reasons = {output.stop_reason for output in by_token if output.finish_reason == "stop"}
    assert reasons
    assert reasons <= {40, 41}
    assert all(output.token_ids[-1] == output.stop_reason for output in by_token if output.stop_reason)


def test_abort_gives_what_there_is(engine: VLLMEngine) -> None:
    engine.update_weights(weights(tiny(1)), 5)
    first = requests_for(PROMPTS[:1], max_tokens=1)[0]
    longer = requests_for(PROMPTS[:8], max_tokens=80, ignore_eos=True)[1:]
    running = engine.generate([first, *longer])
    assert next(running).request_id == 0
    partial = engine.abort([3, 4])
    assert {output.request_id for output in partial} == {3, 4}
    assert {output.finish_reason for output in partial} == {"abort"}
    assert all(
        len(output.token_ids) == len(output.log_probs) == len(output.policy_versions) < 80
        for output in partial
    )
    assert sorted(output.request_id for output in running) == [1, 2, 5, 6, 7]
    assert len(run(engine, max_tokens=2)) == len(PROMPTS), "it goes on"


def test_a_push_that_loses_a_weight_or_does_not_come_is_found(
    engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_spoilt_pushes(engine, monkeypatch)


def test_an_engine_in_this_process_leaves_its_random_numbers_and_threads(folder: str) -> None:
    before, drawn, threads = torch.random.get_rng_state(), random.getstate(), torch.get_num_threads()
    np.random.seed(7)
    build(folder, server=False).close()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert random.getstate() == drawn
    assert torch.get_num_threads() == threads
    assert np.random.rand() == np.random.RandomState(7).rand()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_a_killed_server_is_named_and_finished_rows_are_kept(engine: VLLMEngine) -> None:
    """Last: afterwards the server is gone."""
    if not isinstance(engine.runner, VLLMServer):
        pytest.skip("it would end this process too")
    assert engine.runner.process is not None
    engine.update_weights(weights(tiny(1)), 9)
    short, *_ = requests_for(PROMPTS[:1], max_tokens=1)
    longer = requests_for(PROMPTS[:3], max_tokens=80, ignore_eos=True)[1:]
    running = engine.generate([short, *longer])
    kept = next(running)
    psutil.Process(engine.runner.process.pid).children()[0].kill()
    name = f"vllm server http://127.0.0.1:{engine.runner.address.port}"
    with pytest.raises(EngineDied, match=f"{name} .process"):
        list(running)
    assert kept.finish_reason == "length"
    with pytest.raises(RolloutError, match="died"):
        list(engine.generate([short]))
