"""Ways to use a group of rollout workers, the same for every backend; the engines count up."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hybridflow.controller import Backend
from hybridflow.errors import RolloutError
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.client import LLMClient, ReplicaLost
from hybridflow.workers.rollout import RolloutWorker
from hybridflow.workers.rollout_group import RolloutGroup


class Interrupted(BaseException):
    """A wish to end, as by Ctrl-C."""


def request(number: int, max_tokens: int = 5, last: int | None = None) -> GenerationRequest:
    prompt = (1, 1000 * number if last is None else last)
    return GenerationRequest(number, Prompt(prompt), SamplingParams(max_tokens), seed=number)


def set_version(group: RolloutGroup, version: int) -> None:
    group.call(RolloutWorker.renew_weights, version=version)


def a_list_is_answered_in_its_order(group: RolloutGroup) -> None:
    set_version(group, 3)
    heard: list[int] = []
    lengths = [400, 2, 7, 1, 90, 3]
    requests = [request(number, length) for number, length in enumerate(lengths)]
    made = group.generate(requests, finished=lambda output: heard.append(output.request_id))
    assert [output.request_id for output in made.outputs] == list(range(6))
    assert [len(output.token_ids) for output in made.outputs] == lengths
    assert made.outputs[2].token_ids == list(range(2001, 2008))
    assert all(set(output.policy_versions) == {3} for output in made.outputs)
    assert sorted(heard) == list(range(6)) and heard[-1] == 0, "each once, the longest at last"
    assert [replica.version for replica in group.replicas] == [3] * len(group.replicas)
    assert group.generate([]).outputs == []


async def talk(client: LLMClient, number: int, turns: int) -> list[int]:
    """Each turn goes on from the last token of the one before."""
    last = 1000 * number
    for turn in range(turns):
        output = await client.generate(request(100 * number + turn, 3, last), sticky=number)
        last = output.token_ids[-1]
    return [number, last]


def agents_talk_side_by_side(group: RolloutGroup) -> None:
    async def work(client: LLMClient) -> list[list[int]]:
        assert client.failure is None
        return await asyncio.gather(*(talk(client, number, 1 + number % 4) for number in range(20)))

    ended, _ = group.run(work)
    assert ended == [[number, 1000 * number + 3 * (1 + number % 4)] for number in range(20)]
    assert all(replica.load == 0 for replica in group.replicas)


def what_work_raises_is_raised(group: RolloutGroup) -> None:
    async def work(client: LLMClient) -> None:
        asyncio.get_running_loop().create_task(talk(client, 1, 1000))
        await talk(client, 2, 1)
        raise KeyError("a mistake of the agent")

    with pytest.raises(KeyError, match="a mistake of the agent"):
        group.run(work)
    agents_talk_side_by_side(group)


def weights_change_while_requests_run(group: RolloutGroup) -> None:
    set_version(group, 1)

    async def every_replica_steps(client: LLMClient, first: int) -> None:
        short = [replica.submit(request(first + place, 2)) for place, replica in enumerate(client.replicas)]
        await asyncio.gather(*map(asyncio.wrap_future, short))

    async def work(client: LLMClient) -> list[GenerationOutput]:
        # they end when they are told to: no machine is too quick or too slow for this scene
        long = [asyncio.create_task(client.generate(request(number, 10_000_000))) for number in (1, 2)]
        await client.generate(request(3, 2))  # the tasks have handed theirs in
        await every_replica_steps(client, 10)  # under version 1
        await asyncio.to_thread(set_version, group, 2)
        await every_replica_steps(client, 20)  # under version 2
        await client.abort([1, 2])
        return list(await asyncio.gather(*long))

    outputs, _ = group.run(work)
    for number, output in enumerate(outputs, 1):
        made = len(output.token_ids)
        assert output.finish_reason == "abort"
        assert output.token_ids == list(range(1000 * number + 1, 1000 * number + made + 1)), (
            "no token is lost"
        )
        assert set(output.policy_versions) == {1, 2} and output.policy_versions == sorted(
            output.policy_versions
        )


def a_deadline_ends_a_request(group: RolloutGroup) -> None:
    async def work(client: LLMClient) -> GenerationOutput:
        asyncio.get_running_loop().call_later(0.2, lambda: client.replicas[0].abort([7]))
        with pytest.raises(Exception, match=r"request 8 had no answer of replica rollout-\d within 0.1 s"):
            await client.generate(request(8, 1_000_000), deadline_s=0.1)
        answer = client.replicas[0].submit(request(7, 1_000_000))
        return await asyncio.wrap_future(answer)

    output, _ = group.run(work)
    assert output.finish_reason == "abort"
    assert output.token_ids == list(range(7001, 7001 + len(output.token_ids)))


def whoever_breaks_off_can_go_on(group: RolloutGroup) -> None:
    def leave(output: GenerationOutput) -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        group.generate([request(1, 100_000), request(2, 2), request(3, 3)], finished=leave)
    outputs = group.generate([request(1, 4), request(2, 2)]).outputs
    assert [len(output.token_ids) for output in outputs] == [4, 2]


def nothing_is_left_of_requests_that_nobody_awaits(group: RolloutGroup) -> None:
    async def work(client: LLMClient) -> None:
        client.replicas[0].submit(request(1, 100_000))
        await client.generate(request(2, 2))
        client.replicas[0].submit(request(3, 100_000))

    group.run(work)
    with pytest.raises(ReplicaLost, match="nothing is generated now"):
        group.replicas[0].submit(request(4))
    outputs = group.generate([request(1, 3), request(3, 4)]).outputs
    assert [output.token_ids for output in outputs] == [[1001, 1002, 1003], [3001, 3002, 3003, 3004]]


def equal_ids_are_refused_before_any_runs(group: RolloutGroup) -> None:
    with pytest.raises(RolloutError, match="the same request_id"):
        group.generate([request(1), replace(request(2), request_id=1)])
    a_list_is_answered_in_its_order(group)


SCENES = [
    nothing_is_left_of_requests_that_nobody_awaits,
    equal_ids_are_refused_before_any_runs,
    a_list_is_answered_in_its_order,
    agents_talk_side_by_side,
    what_work_raises_is_raised,
    weights_change_while_requests_run,
    a_deadline_ends_a_request,
    whoever_breaks_off_can_go_on,
]


@cache
def group_on(backend: Backend) -> RolloutGroup:
    """The one group of a backend: it numbers the times that requests are taken, and a poll of an earlier test
    may still wait in a process.
    """
    return RolloutGroup(backend, "rollout")


def factories(host: Any) -> Any:
    from scripted_engine import ScriptedEngine

    return {"rollout": lambda info: RolloutWorker(ScriptedEngine(seconds=0.0005))}
