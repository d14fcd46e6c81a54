"""The vLLM engine over a stand-in runner: what it asks, pieces, weights, and an engine that dies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridflow.errors import RolloutError, WorkerLost
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.remote.runner import EngineDied, ResponsePiece, Submission
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.rollout.vllm.extension import keep_whole_distribution
from hybridflow.weight_sync.wire.receiver import NOTHING, Receiver
from hybridflow.weight_sync.wire.sender import checked

FACTS = {
    "device": "cuda:0",
    "vocabulary": 50,
    "positions": 20,
    "max_log_probs": 5,
    "temperature_only": True,
} | dict.fromkeys(("adapters", "quantized"), False)


PARTS = {"weights", "kv_cache"}


class Scripted:
    """Says token 10 + request id again and again, one piece a poll, and ends at max_tokens.

    Its memory is as strict as vLLM's on a GPU: what is mapped cannot be mapped again, weights go into mapped
    memory only, and an order to sleep is passed over while a part sleeps.
    """

    name = "a scripted engine"

    def __init__(self, **facts: Any) -> None:
        self.received, self.said, self.log = Receiver(), FACTS | facts, list[Any]()
        self.open: dict[int, tuple[int, int]] = {}
        self.dies_at: int | None = None
        self.polls = 0
        self.drops = False
        self.mapped = set(PARTS)

    def facts(self) -> dict[str, Any]:
        return self.said

    def version(self) -> int:
        return self.received.version

    def start(self, submissions: Sequence[Submission]) -> None:
        self.log.append([submission.params for submission in submissions])
        self.open |= {each.request_id: (0, each.params["max_tokens"]) for each in submissions}

    def poll(self) -> list[ResponsePiece]:
        assert self.mapped == PARTS
        self.polls += 1
        if self.polls == self.dies_at:
            raise EngineDied(f"{self.name} died: out of luck")
        pieces = []
        for number, (said, limit) in list(self.open.items()):
            self.open[number] = (said + 1, limit)
            finish = "length" if said + 1 == limit else None
            pieces.append(
                ResponsePiece(
                    number, [10 + number], [-0.5], [[(10 + number, -0.5), (1, -1.0), (2, -2.0)]], finish
                )
            )
            if finish:
                del self.open[number]
        return pieces

    def abort(self, request_ids: Iterable[int]) -> None:
        for number in request_ids:
            del self.open[number]

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        assert "weights" in self.mapped, "there is no memory to put weights into"
        self.log.append(f"push {version}")
        if not self.drops:
            self.received.take(dict, checked(weights), version)

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")
        if level > 1:
            self.received.forget()
        if self.mapped == PARTS:
            self.mapped = set()

    def wake_up(self, tags: Sequence[str]) -> None:
        self.log.append(f"wake {tags}")
        assert not self.mapped.intersection(tags), f"{tags} would be mapped twice"
        self.mapped |= set(tags)

    def close(self) -> None:
        self.log.append("close")


def ready(**facts: Any) -> tuple[VLLMEngine, Scripted]:
    runner = Scripted(**facts)
    engine = VLLMEngine(runner, eos_token_ids=[2, 3])
    engine.update_weights(WEIGHTS, 4)
    return engine, runner


WEIGHTS = [("w", torch.ones(3))]


def request(number: int, prompt: tuple[int, ...] = (5, 6), **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        number, Prompt(prompt), SamplingParams(**{"max_tokens": 3, **sampling}), seed=number
    )


def test_outputs_have_tokens_log_probs_and_versions() -> None:
    engine, _ = ready()
    first, second = engine.generate([request(0, max_tokens=2), request(1, top_log_probs=2)])
    assert (first.token_ids, first.log_probs, first.finish_reason, first.policy_versions) == (
        [10, 10],
        [-0.5, -0.5],
        "length",
        [4, 4],
    )
    assert first.top_log_probs is None and second.top_log_probs == [[(11, -0.5), (1, -1.0)]] * 3
    assert engine.stats.generated_tokens == 5
    assert engine.stats.prefill_tokens == 2
    assert engine.stats.max_rows == 2


def test_requests_in_vllms_words() -> None:
    engine, runner = ready()
    sampling = {
        "temperature": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "stop_token_ids": (7,),
        "logit_bias": ((9, -2.0),),
        "stop": ("x",),
    }
    list(engine.generate([request(0, **sampling), request(1, greedy=True, top_k=4, ignore_eos=True)]))
    full, bare = runner.log[-1]
    assert full["stop_token_ids"] == [2, 3, 7]
    assert full["ignore_eos"]
    assert full["logit_bias"] == {9: -2.0}
    assert full["top_k"] == 4
    assert bare["temperature"] == 0
    assert bare["stop_token_ids"] == []
    assert "top_k" not in bare
    assert bare["logprobs"] == 0


@pytest.mark.parametrize(
    ("bad", "facts", "reason"),
    [
        (request(0, ()), {}, "the prompt is empty"),
        (request(0, (50,)), {}, "token id 50"),
        (request(0, (4,) * 18), {}, "is more than"),
        (request(0, temperature=0.001), {}, "between 0 and 0.01"),
        (request(0, top_log_probs=6), {}, "at most 5"),
        (request(0, logit_bias=((3, 101.0),)), {}, "from -100 to 100"),
        (request(0, logit_bias=((3, float("nan")),)), {}, "from -100 to 100"),
        (request(0, logit_bias=((50, 1.0),)), {}, "vocabulary is 0..49"),
        (request(0, top_p=0.9), {"temperature_only": False}, "whole distribution"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_alone(
    bad: GenerationRequest, facts: dict[str, Any], reason: str
) -> None:
    engine, _ = ready(**facts)
    refusal, served = engine.generate([bad, request(1)])
    assert refusal.finish_reason == "error"
    assert reason in str(refusal.error)
    assert served.token_ids == [11, 11, 11]


def test_an_end_token_that_the_vocabulary_lacks_is_not_named() -> None:
    engine = VLLMEngine(Scripted(), eos_token_ids=[2, 50, 2, 70])
    assert engine.params(request(0, min_tokens=2))["stop_token_ids"] == [2]


def test_abort_gives_what_there_is() -> None:
    engine, runner = ready()
    running = engine.generate([request(0, max_tokens=1), request(1), request(2)])
    assert next(running).request_id == 0
    (partial,) = engine.abort([1, 7])
    assert (partial.token_ids, partial.finish_reason, partial.policy_versions) == ([11], "abort", [4])
    assert [output.request_id for output in running] == [2] and not runner.open


def test_a_reader_who_leaves_aborts_the_rest() -> None:
    engine, runner = ready()
    running = engine.generate([request(0, max_tokens=1), request(1)])
    next(running)
    running.close()  # type: ignore[attr-defined]
    assert not runner.open and len(list(engine.generate([request(2)]))) == 1


def test_an_engine_that_dies_leaves_what_was_finished_and_is_a_lost_worker() -> None:
    engine, runner = ready()
    runner.dies_at = 3
    running = engine.generate([request(0, max_tokens=2), request(1)])
    assert next(running).finish_reason == "length"
    with pytest.raises(WorkerLost, match="a scripted engine died: out of luck"):
        next(running)


def test_a_dropped_push_is_found_at_once() -> None:
    engine, runner = ready()
    runner.drops = True
    with pytest.raises(
        RolloutError,
        match="weights of version 5 were pushed to a scripted engine, which says it has version 4",
    ):
        engine.update_weights(WEIGHTS, 5)
    runner.received.version = NOTHING
    with pytest.raises(RolloutError, match="has no weights yet"):
        list(engine.generate([request(0)]))
    with pytest.raises(RolloutError, match="update_weights brings a version"):
        engine.set_version(5)


def test_sleep_and_wake_as_the_trainer_calls_them() -> None:
    """A generation wakes the engine and puts it to sleep again; updates come while it sleeps.

    Nothing is woken twice: vLLM would map the weights' memory again, which fails on a GPU.
    """
    engine, runner = ready()

    def generate() -> None:
        engine.wake_up()
        assert len(list(engine.generate([request(0)]))) == 1
        engine.sleep()

    generate()  # awake since it started
    generate()  # a validation: no update before it
    engine.update_weights(WEIGHTS, 5)
    generate()
    said = [each for each in runner.log if isinstance(each, str) and "push" not in each]
    both = "wake ['weights', 'kv_cache']"
    assert said == ["sleep 1", both, "sleep 1", "wake ['weights']", "wake ['kv_cache']", "sleep 1"]
    engine.sleep()
    with pytest.raises(RolloutError, match="sleeping engine"):
        engine.generate([request(0)])
    engine.update_weights(WEIGHTS, 6)
    with pytest.raises(RolloutError, match="sleeping engine"):
        engine.generate([request(0)])  # its cache still sleeps
    engine.update_weights(WEIGHTS, 7)
    engine.wake_up(["kv_cache"])
    assert len(list(engine.generate([request(0)]))) == 1
    said = [each for each in runner.log if isinstance(each, str) and "push" not in each]
    assert said[6:] == ["wake ['weights']", "wake ['kv_cache']"]
    on_cpu, cpu_runner = ready(device="cpu")
    on_cpu.sleep(2)
    assert cpu_runner.log == ["push 4"] and len(list(on_cpu.generate([request(0)]))) == 1


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_is_half_asleep_falls_asleep_as_a_whole(level: int) -> None:
    engine, runner = ready()
    engine.sleep()
    engine.update_weights(WEIGHTS, 5)
    assert runner.mapped == {"weights"}
    engine.sleep(level)
    assert runner.mapped == set() and engine.asleep
    engine.wake_up()
    assert runner.mapped == PARTS and engine.policy_version == (5 if level == 1 else NOTHING)


def test_nothing_else_while_generating() -> None:
    engine, _ = ready()
    running = engine.generate([request(0), request(1, max_tokens=1)])
    next(running)
    for call in (engine.sleep, lambda: engine.update_weights(WEIGHTS, 5), lambda: engine.generate([])):
        with pytest.raises(RolloutError, match="while"):
            call()
    running.close()  # type: ignore[attr-defined]
    with pytest.raises(RolloutError, match="same request_id"):
        engine.generate([request(0), request(0)])


class LikeVLLMs:
    """The two parts of vLLM's sampler that count here: log-probs first, then logits are changed in place."""

    def __init__(self) -> None:
        self.logprobs_mode, self.topk_topp_sampler = (
            "processed_logprobs",
            type("Inner", (), {"logprobs_mode": "processed_logprobs"})(),
        )

    def compute_logprobs(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)

    def forward(self, logits: Tensor, sampling_metadata: Any) -> Tensor:
        kept = self.compute_logprobs(logits)
        logits.fill_(0)
        return kept


def test_log_probs_are_those_at_the_temperature_alone() -> None:
    sampler, logits = LikeVLLMs(), torch.randn(3, 8)
    keep_whole_distribution(sampler)
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "raw_logprobs"  # type: ignore[attr-defined]
    temperature = torch.tensor([0.5, 0.0, 2.0])
    wanted = (logits / torch.tensor([0.5, 1.0, 2.0])[:, None]).log_softmax(-1)
    assert torch.equal(
        sampler.forward(logits.clone(), type("Rows", (), {"temperature": temperature})()), wanted
    )
    greedy = sampler.forward(logits.clone(), type("Rows", (), {"temperature": None})())
    assert torch.equal(greedy, logits.log_softmax(-1))
