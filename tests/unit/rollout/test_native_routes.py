"""Routes that the native engine records: those of every token, whatever was shared, preempted or paged."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from rollout_models import prompts, requests_for, run, tiny_hf

from hybridflow.models.experts.routing import RouteTape
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.rollout.native.engine import NativeEngine

FAMILY = "deepseek_v3"


def engine(policy: PolicyModel, **settings: Any) -> NativeEngine:
    return NativeEngine(policy, eos_token_ids=(2,), records_routes=True, **settings)


def passes(policy: PolicyModel) -> list[int]:
    """The list to which each pass of the model from now on adds its tokens."""
    seen: list[int] = []
    policy.hf.base_model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["input_ids"].numel()), with_kwargs=True
    )
    return seen


def assert_routes_of_training(policy: PolicyModel, requests: Any, outputs: Any) -> None:
    """The routes of each output are those that a forward pass over the row takes."""
    token_ids = [outputs[request.request_id].token_ids for request in requests]
    rows = make_rows([request.prompt_token_ids for request in requests], token_ids, pad_id=0)
    packed = pack(DataProto.from_dict(rows))
    with torch.no_grad():
        policy(packed)
    wanted = policy.routes_of(packed).split(packed.lengths)
    for request, routes in zip(requests, wanted, strict=True):
        found = outputs[request.request_id].routes
        assert found is not None and found.dtype == np.int16
        np.testing.assert_array_equal(found, routes[:-1].numpy())


@pytest.mark.parametrize("settings", [{}, {"kv_cache": "paged", "block_size": 4}, {"look_ahead": True}])
def test_routes_are_those_of_training_at_no_extra_pass(settings: dict[str, Any]) -> None:
    policy = PolicyModel(tiny_hf(FAMILY))
    requests = requests_for([*prompts(6), prompts(6)[2]], n=3, max_tokens=9)
    seen = passes(policy)
    plain = NativeEngine(policy, eos_token_ids=(2,), **settings)
    without = run(plain, requests)
    number = len(seen)
    recording = engine(policy, **settings)
    recording._kv_cache()  # the engine looks at its layers once
    seen.clear()
    outputs = run(recording, requests)
    assert len(seen) in (number, number - 1), "one pass of one token is the look at the layers"
    assert [outputs[i].log_probs for i in outputs] == [without[i].log_probs for i in outputs]
    assert all(output.routes is None for output in without.values())
    assert_routes_of_training(policy, requests, outputs)
    copy = pickle.loads(pickle.dumps(outputs[0]))
    np.testing.assert_array_equal(copy.routes, outputs[0].routes)


def test_prefix_hits_chunks_and_preempted_rows_have_all_their_routes() -> None:
    policy = PolicyModel(tiny_hf(FAMILY))
    long = tuple(3 + place % 40 for place in range(40))
    requests = requests_for([long, (*long[:30], 7, 8), long[:33], *prompts(3)], n=2, max_tokens=10)
    recording = engine(policy, max_num_batched_tokens=16, max_num_seqs=4)
    with_hits = recording.open()
    with_hits.add(requests)
    found: dict[int, Any] = {}
    for number in range(400):
        found |= {output.request_id: output for output in with_hits.step()}
        if number == 12:
            recording.set_version(1)  # running rows go on with their keys, prefixes go
        if with_hits.idle:
            break
    with_hits.close()
    assert len(found) == len(requests)
    assert_routes_of_training(policy, requests, found)


def test_an_aborted_row_has_the_routes_of_what_it_has() -> None:
    policy = PolicyModel(tiny_hf(FAMILY))
    requests = requests_for(prompts(2), max_tokens=20, ignore_eos=True)
    session = engine(policy).open()
    session.add(requests)
    for _ in range(4):
        session.step()
    outputs = {output.request_id: output for output in session.abort([0, 1])}
    session.close()
    assert all(0 < len(output.token_ids) < 20 for output in outputs.values())
    assert_routes_of_training(policy, requests, outputs)
    assert isinstance(policy.tape, RouteTape)
