"""One request's own values: they fail that request alone, and its width is not the width of all rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rollout_models import EOS, VOCABULARY, prompts, requests_for, run, tiny_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.session import Session

HUGE = 10**30


def request(number: int, *, seed: Any = 0, prompt: Any = (5, 6), **fields: Any) -> GenerationRequest:
    fields = {"max_tokens": 6, "ignore_eos": True, **fields}
    return GenerationRequest(number, Prompt(prompt), SamplingParams(**fields), seed)


def finish(session: Session) -> dict[int, GenerationOutput]:
    outputs: dict[int, GenerationOutput] = {}
    while not session.idle:
        outputs.update({output.request_id: output for output in session.step()})
    return outputs


@pytest.mark.parametrize(
    "bad",
    [
        request(1, prompt=(5, 6.5)),
        request(1, prompt=(5, HUGE)),
        request(1, prompt=(5, "a")),
        request(1, seed="seven"),
        request(1, stop_token_ids=(HUGE,)),
        request(1, stop_token_ids=(3.5,)),
        request(1, stop_token_ids=(-4,)),
        request(1, logit_bias=((3.5, 1.0),)),
        request(1, logit_bias=((3, "high"),)),
        request(1, logit_bias=((3, 1e300),)),
        request(1, logit_bias=((3, 1.0, 2.0),)),
        request(1, max_tokens=HUGE),
        request(1, max_tokens=7.5),
        request(1, top_k=2.5),
    ],
)
def test_a_value_that_does_not_fit_fails_its_request_alone(bad: GenerationRequest) -> None:
    wanted = run(tiny_engine(), [request(0), request(2)])
    outputs = run(tiny_engine(), [request(0), bad, request(2)])
    assert outputs[1].finish_reason == "error"
    assert outputs[1].refused
    assert "request 1: " in str(outputs[1].error)
    assert {number: outputs[number] for number in (0, 2)} == wanted
    session = tiny_engine().open()
    (refused,) = session.add([request(0), bad, request(2)])
    assert refused.request_id == 1 and refused.refused
    assert finish(session) == wanted
    session.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 2**63},
        {"top_k": HUGE},
        {"top_p": 1e-300},
        {"min_p": 1e-300},
        {"temperature": 1e-20},
        {"temperature": 1e20, "repetition_penalty": 1e-6},
        {"temperature": 1e-20, "repetition_penalty": 1e6, "logit_bias": ((3, 1e9), (4, -1e9))},
    ],
)
@pytest.mark.parametrize("seed", [0, HUGE, -HUGE])
def test_extreme_values_that_mean_something_are_served(fields: dict[str, Any], seed: int) -> None:
    output = run(tiny_engine(), [request(0, seed=seed, **fields)])[0]
    assert output.finish_reason == "length" and len(output.token_ids) == 6


def test_a_top_k_above_the_vocabulary_keeps_all_tokens() -> None:
    wanted = run(tiny_engine(), [request(0, seed=9, max_tokens=20)])
    for top_k in (VOCABULARY, VOCABULARY + 1, 2**63, HUGE):
        assert run(tiny_engine(), [request(0, seed=9, max_tokens=20, top_k=top_k)]) == wanted


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 1e-45}, {"temperature": 1e300}, {"repetition_penalty": 1e-45}, {"stop": ("\ud800",)}],
)
def test_parameters_that_no_engine_can_use_are_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=next(iter(fields))):
        SamplingParams(max_tokens=4, **fields)


WIDE = {
    "stop_token_ids": tuple(range(3, 43)) * 1_000,
    "logit_bias": tuple((token, -1.0) for token in range(3, 43)),
    "repetition_penalty": 1.5,
    "min_tokens": 8,
}


def test_a_wide_row_leaves_the_others_as_narrow_as_they_were() -> None:
    engine = tiny_engine(eos=(EOS,))
    session = engine.open()
    session.add([request(0, max_tokens=60)])
    session.step()
    rows = session.rows
    assert rows.stops.shape[1] <= 4
    session.add([request(1, max_tokens=100, **WIDE)])
    session.step()
    assert rows.stops.shape[1] == 40  # each token once
    finish(session)
    assert rows.stops.shape[1] <= 4
    narrow = request(2, logit_bias=((5, 1.0),), repetition_penalty=1.2)
    session.add([narrow])
    outputs = finish(session)
    assert [rows.bias.shape[1], rows.bias_token.shape[1]] == [1, 1] and rows.history.shape[1] <= 4 * 8
    assert outputs[2] == run(tiny_engine(eos=(EOS,)), [narrow])[2]
    session.close()


def test_rows_that_narrow_and_come_back_keep_what_is_theirs() -> None:
    own = {"stop_token_ids": (46, 47), "logit_bias": ((5, 2.0), (6, 1.0)), "repetition_penalty": 1.1}
    requests = [
        request(number, prompt=prompt, max_tokens=40, **own) for number, prompt in enumerate(prompts(3))
    ]
    wanted = run(tiny_engine(dtype=torch.float64), requests)
    session = tiny_engine(dtype=torch.float64).open()
    session.add([*requests, request(9, max_tokens=8, **WIDE)])
    for _ in range(4):
        session.step()
    session._preempt()  # rows that leave while a wide one is there
    session._preempt()
    session.abort([9])
    assert session.rows.stops.shape[1] == 2
    outputs = finish(session)
    assert len(outputs) == 3
    for number, output in outputs.items():
        assert output.token_ids == wanted[number].token_ids
        assert output.log_probs == pytest.approx(wanted[number].log_probs, abs=1e-9)
    session.close()


class Copied(TorchDispatchMode):
    """Counts the elements that are picked out of columns, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.index_select):
            self.count += sum(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result


def test_following_a_response_copies_each_token_once() -> None:
    session = tiny_engine(eos=()).open()
    requests = requests_for(prompts(4), max_tokens=100, ignore_eos=True)
    session.add(requests)
    seen = dict.fromkeys(range(4), 0)
    copied = Copied()
    got: dict[int, list[int]] = {number: [] for number in seen}
    outputs: dict[int, GenerationOutput] = {}
    while not session.idle:
        outputs.update({output.request_id: output for output in session.step()})
        with copied:
            partials = session.so_far(seen)
        for partial in partials:
            assert partial.start == seen[partial.request_id]
            seen[partial.request_id] += len(partial.token_ids)
            got[partial.request_id] += partial.token_ids
    session.close()
    for number, tokens in got.items():
        assert tokens == outputs[number].token_ids[: len(tokens)] and len(tokens) == 99
    # tokens and log-probs of 4 × 99 once, and each round the lengths of four rows
    assert copied.count <= 2 * 4 * 99 + 4 * 100


def test_weights_that_are_missing_are_named() -> None:
    engine = tiny_engine()
    weights = {name: weight.clone() for name, weight in engine.policy.hf.state_dict().items()}
    lost = [name for name in weights if "layers.1.mlp" in name]
    some = [(name, weight) for name, weight in weights.items() if name not in lost]
    with pytest.raises(RolloutError, match=rf"missing: {lost[0]}, {lost[1]}.*give it all of them"):
        engine.update_weights(some, version=3)
    with pytest.raises(RolloutError, match=f"got 0 of {len(weights)} weights; missing: .* and .* more"):
        engine.update_weights([], version=3)
    assert engine.policy_version == 0
    engine.update_weights(weights.items(), version=4)
    assert engine.policy_version == 4


def test_one_of_two_tied_weights_stands_for_both() -> None:
    engine = tiny_engine("qwen2")
    weights = {name: weight.clone() for name, weight in engine.policy.hf.state_dict().items()}
    assert engine.policy.hf.get_output_embeddings().weight is engine.policy.hf.get_input_embeddings().weight
    for left_out in ("lm_head.weight", "model.embed_tokens.weight"):
        engine.update_weights([(n, w) for n, w in weights.items() if n != left_out], version=5)
