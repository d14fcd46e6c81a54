"""Serving without an end while weights change, the same for every backend: tiny models in exact mode, an
actor whose weights change by `learn`, and a rollout with weights of its own.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from worker_house import LIMITS, OPTIM, llama

from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.controller import Backend, Dispatch, register
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import RolloutError
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.client import ReplicaLost
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.weight_sync.holding import Holding
from hybridflow.weight_sync.push import RemotePush
from hybridflow.workers.actor import ActorGroup, ActorWorker
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_group import RolloutGroup

LONG = 48


def exact_policy() -> PolicyModel:
    policy = PolicyModel(llama())
    policy.exact = ExactMode.choices(policy.hf.base_model, 64)[-1]
    return policy


def learn_by(policy: PolicyModel, amount: float) -> None:
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.0 + amount)


class Learner(ActorWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def learn(self, amount: float) -> None:
        learn_by(self.engine.policy, amount)


def actor_worker(info: object) -> Learner:
    engine = FSDPEngine(exact_policy(), name="actor", optim=OPTIM)
    return Learner(engine, ActorConfig(), temperature=1.0, log_prob_limits=LIMITS)


class Paced(NativeEngine):
    """An engine whose steps take at least so many seconds."""

    seconds = 0.0

    def _new_session(self, closed: bool) -> Any:
        session: Any = super()._new_session(closed)
        step = session.step

        def paced() -> Any:
            time.sleep(self.seconds)
            return step()

        session.step = paced
        return session


class PacedRollout(RolloutWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take_steps_of(self, seconds: float) -> None:
        assert isinstance(self.engine, Paced)
        self.engine.seconds = seconds


def rollout_worker(*, recomputes: bool = True) -> RolloutWorker:
    policy = exact_policy().requires_grad_(False)
    push = RemotePush(policy, Holding.whole(policy))
    return PacedRollout(Paced(policy, eos_token_ids=[2]), push, recomputes=recomputes)


def factories(host: Any) -> Any:
    return {"actor": actor_worker, "rollout": lambda info: rollout_worker()}


def keeping_factories(host: Any) -> Any:
    return {"actor": actor_worker, "rollout": lambda info: rollout_worker(recomputes=False)}


class Hanging(RemotePush):
    """A push that never ends."""

    def update(self, engine: object, shares: object, version: int) -> None:
        threading.Event().wait()


def hanging_factories(host: Any) -> Any:
    def hanging(info: object) -> RolloutWorker:
        worker = rollout_worker()
        policy = exact_policy()
        worker.pushed = Hanging(policy, Holding.whole(policy))
        return worker

    return {"actor": actor_worker, "rollout": hanging}


class Standing(NativeEngine):
    """An engine whose sessions never end a step."""

    def _new_session(self, closed: bool) -> Any:
        threading.Event().wait()


def standing_factories(host: Any) -> Any:
    policy = exact_policy().requires_grad_(False)
    push = RemotePush(policy, Holding.whole(policy))
    engine = Standing(policy, eos_token_ids=[2])
    return {"actor": actor_worker, "rollout": lambda info: RolloutWorker(engine, push)}


class Groups:
    """The two groups of a fresh start: the weights are those of `llama()` as version 0."""

    def __init__(self, backend: Backend) -> None:
        self.actor = ActorGroup(backend, "actor")
        self.rollout = RolloutGroup(backend, "rollout")
        self.amounts: list[float] = []

    def learn(self, amount: float) -> None:
        self.actor.call(Learner.learn, amount)  # type: ignore[arg-type]
        self.amounts.append(amount)

    def policy(self, num_changes: int) -> PolicyModel:
        """The actor's policy as it was after so many changes."""
        policy = exact_policy()
        for amount in self.amounts[:num_changes]:
            learn_by(policy, amount)
        return policy


def request(number: int, max_tokens: int = LONG) -> GenerationRequest:
    prompt = Prompt((3 + number % 20, 7, 9 + number % 5))
    return GenerationRequest(number, prompt, SamplingParams(max_tokens, ignore_eos=True), seed=number)


def undisturbed(requests: Sequence[GenerationRequest]) -> dict[int, GenerationOutput]:
    engine = NativeEngine(exact_policy(), eos_token_ids=[2])
    return {output.request_id: output for output in engine.generate(requests)}


def bits(output: GenerationOutput) -> tuple[list[int], list[float]]:
    return output.token_ids, output.log_probs


def scored(policy: PolicyModel, asked: GenerationRequest, output: GenerationOutput) -> list[float]:
    """The log-probs of a response as training computes them under these weights."""
    packed = pack(DataProto.from_dict(make_rows([asked.prompt_token_ids], [output.token_ids], pad_id=0)))
    with torch.no_grad():
        return policy(packed, temperature=1.0).log_probs.tolist()


@contextmanager
def serving_all_the_time(group: RolloutGroup) -> Iterator[list[BaseException]]:
    """Serve in a thread until the context is left; what ends it before is in the list."""
    ended = threading.Event()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            group.serve(ended.is_set)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield failures
    finally:
        ended.set()
        group.wake()
        thread.join(120)
        assert not thread.is_alive()


def submit(group: RolloutGroup, requests: Sequence[GenerationRequest]) -> dict[int, Future[GenerationOutput]]:
    replicas = group.replicas
    return {each.request_id: replicas[each.request_id % len(replicas)].submit(each) for each in requests}


def what_is_not_answered_goes_on_in_the_next_serve(groups: Groups) -> None:
    group = groups.rollout
    requests = [request(number, 2 if number < 2 else LONG) for number in range(6)]
    wanted = undisturbed(requests)
    # the long ones must not end before a busy driver has heard of the short ones
    group.call(PacedRollout.take_steps_of, 0.1)
    with group.opened() as client:
        assert client.failure is None
        answers = submit(group, requests)
        for number in (0, 1):
            answers[number].add_done_callback(lambda _: group.wake())
        stats = group.serve(lambda: answers[0].done() and answers[1].done())
        assert stats.generated_tokens > 0 and not answers[5].done()
        assert group.serve(lambda: True).generated_tokens == 0, "it is over before it begins"
        group.update_from(groups.actor, 4)
        group.call(PacedRollout.take_steps_of, 0.0)
        for number in range(2, 6):
            answers[number].add_done_callback(lambda _: group.wake())
        group.serve(lambda: all(answer.done() for answer in answers.values()))
    outputs = {number: answer.result(0) for number, answer in answers.items()}
    assert {number: bits(output) for number, output in outputs.items()} == {
        number: bits(output) for number, output in wanted.items()
    }
    for number in range(2, 6):
        versions = outputs[number].policy_versions
        assert versions == sorted(versions) and set(versions) == {0, 4}
    with pytest.raises(ReplicaLost, match="nothing is generated now"):
        group.replicas[0].submit(request(9))


def equal_weights_in_flight_change_no_bit(groups: Groups) -> None:
    group = groups.rollout
    requests = [request(number) for number in range(8)]
    wanted = undisturbed(requests)
    with group.opened(), serving_all_the_time(group):
        answers = submit(group, requests)
        version = 0
        while not all(answer.done() for answer in answers.values()):
            version += 1
            group.update_from(groups.actor, version)
            assert all(replica.version == version for replica in group.replicas)
    outputs = {number: answer.result(0) for number, answer in answers.items()}
    assert {number: bits(output) for number, output in outputs.items()} == {
        number: bits(output) for number, output in wanted.items()
    }
    assert all(output.policy_versions == sorted(output.policy_versions) for output in outputs.values())


def each_segment_has_the_log_probs_of_its_version(groups: Groups) -> None:
    group = groups.rollout
    requests = [request(number) for number in range(4)]
    # the long ones must not end before the third update, however late a busy driver hears of the short ones
    group.call(PacedRollout.take_steps_of, 0.1)
    with group.opened():
        answers = submit(group, requests)
        for version in range(1, 4):
            # on each replica, all others have a token by then
            heard = submit(group, [request(100 * version + place, 3) for place in range(2)])
            for short in heard.values():
                short.add_done_callback(lambda _: group.wake())
            group.serve(lambda heard=heard: all(short.done() for short in heard.values()))
            groups.learn(0.1 * version)
            group.update_from(groups.actor, version)
        group.call(PacedRollout.take_steps_of, 0.0)
        for answer in answers.values():
            answer.add_done_callback(lambda _: group.wake())
        group.serve(lambda: all(answer.done() for answer in answers.values()))
    for asked in requests:
        output = answers[asked.request_id].result(0)
        assert set(output.policy_versions) == {0, 1, 2, 3} and len(output.token_ids) == LONG
        found = [scored(groups.policy(version), asked, output) for version in range(4)]
        wanted = [found[version][place] for place, version in enumerate(output.policy_versions)]
        assert output.log_probs == wanted, "recomputed keys and values: to the bit"
        assert output.log_probs != found[0] and output.log_probs != found[3]


def staged_weights_wait_until_they_are_taken(groups: Groups) -> None:
    group = groups.rollout
    assert group.can_stage(groups.actor)
    groups.learn(0.2)
    staged = group.stage(groups.actor, 1)
    groups.learn(0.3)
    later = group.stage(groups.actor, 2)
    asked = request(1)
    assert staged.shares is not None
    memory = [weakref.ref(part) for part in staged.shares.parts.values()]
    outputs = []
    for weights in (None, staged, later):
        if weights is not None:
            group.take(weights)
        outputs += group.generate([asked]).outputs
    for version, output in enumerate(outputs):
        assert set(output.policy_versions) == {version}
        assert output.log_probs == scored(groups.policy(version), asked, output)
    gc.collect()
    assert [part() for part in memory] == [None] * len(memory), "what was taken is freed"
    with pytest.raises(RolloutError, match="version 1 were taken already"):
        group.take(staged)


def a_list_in_between_sets_the_others_aside(groups: Groups) -> None:
    group = groups.rollout
    requests = [request(number) for number in range(4)]
    wanted = undisturbed(requests)
    with group.opened(), serving_all_the_time(group):
        answers = submit(group, requests)
        for _ in range(3):
            between = group.generate([request(number, 5) for number in range(4)]).outputs
            assert [output.token_ids for output in between] == [
                wanted[number].token_ids[:5] for number in range(4)
            ]
        outputs = {number: answer.result(120) for number, answer in answers.items()}
    assert {number: bits(output) for number, output in outputs.items()} == {
        number: bits(output) for number, output in wanted.items()
    }
    with group.opened(), pytest.raises(RolloutError, match="open already"), group.opened():
        pass


SCENES = [
    what_is_not_answered_goes_on_in_the_next_serve,
    equal_weights_in_flight_change_no_bit,
    each_segment_has_the_log_probs_of_its_version,
    staged_weights_wait_until_they_are_taken,
    a_list_in_between_sets_the_others_aside,
]
