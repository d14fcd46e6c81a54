"""Compiled decoding: the states of the plain step within roundings, few operations, and a way back."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout_models import prompts, requests_for, run, tiny_hf
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from hybridflow.models.compiled_decoder import CompiledDecoder
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import GenerationOutput
from hybridflow.rollout.native.engine import NativeEngine

WRITES_AND_ATTENTION = 3
"""Operations of a layer that are not compiled: keys, values and attention."""


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let functions be captured and run without a code generator, which takes half a minute; their names."""
    names = []
    own = torch.compile

    def capture(function: Callable[..., Any], **settings: Any) -> Any:
        names.append(function.__name__)
        return own(function, **settings, backend="eager")

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", capture)
    return names


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let functions run as they are, without being captured, which takes seconds; their names."""
    names = []

    def take(function: Callable[..., Any], **settings: Any) -> Any:
        names.append(function.__name__)
        return function

    monkeypatch.setattr(torch, "compile", take)
    return names


class Watch(TorchDispatchMode):
    """Sees every operation, as the recorder of graphs does before it records."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def outputs_of_two(policy: PolicyModel, **settings: Any) -> dict[int, GenerationOutput]:
    """Two rows that begin and end together: the functions are captured for one number of rows."""
    engine = NativeEngine(policy, eos_token_ids=[], **settings)
    return run(engine, requests_for(prompts(2), max_tokens=7))


def outputs_of(policy: PolicyModel, **settings: Any) -> dict[int, GenerationOutput]:
    engine = NativeEngine(policy, eos_token_ids=[], max_num_seqs=5, **settings)
    requests = requests_for(prompts(6), max_tokens=7)
    return run(engine, [*requests[:5], *requests_for(prompts(6), max_tokens=12)[5:]])


@pytest.mark.parametrize(("kind", "how"), [("llama", "captured"), ("qwen2", "given"), ("qwen3", "given")])
def test_tokens_and_log_probs_are_those_of_the_plain_step(
    kind: str, how: str, request: pytest.FixtureRequest
) -> None:
    """Rows end one by one, so that the functions run with 5 rows to 1."""
    names: list[str] = request.getfixturevalue(how)
    hf = tiny_hf(kind)
    wanted = outputs_of(PolicyModel(hf))
    assert not names
    policy = PolicyModel(hf)
    got = outputs_of(policy, enable_torch_compile=True)
    assert names == ["enter", "between", "finish"]
    assert policy._compiled is not None and policy._compiled.works
    for number, one in wanted.items():
        assert got[number].token_ids == one.token_ids
        assert got[number].log_probs == pytest.approx(one.log_probs, abs=1e-5)


def test_later_steps_follow_the_weights_and_those_that_are_watched_are_plain(captured: list[str]) -> None:
    policy = PolicyModel(tiny_hf())
    wanted = outputs_of_two(policy, enable_torch_compile=True)
    with Watch():  # type: ignore[no-untyped-call]
        watched = outputs_of_two(policy, enable_torch_compile=True)
    assert policy._compiled is not None and policy._compiled.works
    assert {n: one.token_ids for n, one in watched.items()} == {n: one.token_ids for n, one in wanted.items()}
    assert outputs_of_two(policy, enable_torch_compile=True) == wanted
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    got = outputs_of_two(policy, enable_torch_compile=True)
    policy.compiles_decoding = False
    assert {n: one.token_ids for n, one in got.items()} == {
        n: one.token_ids for n, one in outputs_of_two(policy).items()
    }


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss"])
def test_other_models_do_without_it_and_say_so(
    kind: str, given: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    policy = PolicyModel(tiny_hf(kind))
    with caplog.at_level(logging.WARNING):
        outputs_of(policy, enable_torch_compile=True)
    assert policy._compiled is None and not given
    assert caplog.text.count("is not built like Llama") == 1


def test_layers_with_adapters_do_without_it(given: list[str], caplog: pytest.LogCaptureFixture) -> None:
    class Adapted(torch.nn.Linear):
        pass

    hf = tiny_hf()
    hf.base_model.layers[1].mlp.up_proj.__class__ = Adapted
    policy = PolicyModel(hf)
    with caplog.at_level(logging.WARNING):
        outputs_of(policy, enable_torch_compile=True)
    assert policy._compiled is None and not given
    assert caplog.text.count("its layers have adapters") == 1


def test_a_compiler_that_fails_costs_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hf = tiny_hf()
    wanted = outputs_of(PolicyModel(hf))

    def broken(*arguments: Any) -> None:
        raise RuntimeError("no C++ compiler\nand much more")

    monkeypatch.setattr(torch, "compile", lambda function, **settings: broken)
    with caplog.at_level(logging.WARNING):
        assert outputs_of(PolicyModel(hf), enable_torch_compile=True) == wanted
    (message,) = [record.getMessage() for record in caplog.records]
    assert "without torch.compile (RuntimeError: no C++ compiler)" in message
    assert "rollout.enable_torch_compile=false" in message


def test_wrong_states_are_found_in_the_first_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hf = tiny_hf()
    wanted = outputs_of(PolicyModel(hf))

    def wrong(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
        if function.__name__ != "finish":
            return function
        return lambda *arguments: function(*arguments) * 1.01

    monkeypatch.setattr(torch, "compile", wrong)
    with caplog.at_level(logging.WARNING):
        assert outputs_of(PolicyModel(hf), enable_torch_compile=True) == wanted
    assert "its states are 0.01 from those of the plain step" in caplog.text


def test_it_is_checked_in_the_first_step_and_exact_mode_does_without_it(given: list[str]) -> None:
    """The second step may be watched for a recording, in which nothing may wait."""
    policy = PolicyModel(tiny_hf())
    policy.exact = ExactMode(32)
    for used in (False, True):
        outputs = run(
            NativeEngine(policy, eos_token_ids=[], enable_torch_compile=True),
            requests_for([(3, 4)], max_tokens=2),
        )
        assert len(outputs[0].token_ids) == 2  # the first by the prefill, the second by the only step
        assert bool(given) is used and (policy._compiled is not None) is used
        policy.exact = None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_layer_has_at_most_sixteen_operations(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Those of the code that torch generates for a CPU, by its calls of products and of fused functions."""
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch._dynamo.reset()
    policy = PolicyModel(tiny_hf(kind, num_hidden_layers=3))
    wanted = outputs_of(policy)
    got, sources = run_and_get_code(outputs_of, policy, enable_torch_compile=True)
    compiled = policy._compiled
    assert isinstance(compiled, CompiledDecoder) and compiled.works
    assert {n: one.token_ids for n, one in got.items()} == {n: one.token_ids for n, one in wanted.items()}
    calls = [
        re.findall(r"(extern_kernels\.\w+|cpp_fused\w*)\(", source.split("def call")[1]) for source in sources
    ]
    most = max(map(len, calls))  # `between` has the most: a whole layer
    assert most == 12 and most + WRITES_AND_ATTENTION <= 16
