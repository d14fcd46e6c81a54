"""Engines without a model that say what a script says, and clients of them, for tests of agents."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hybridflow.agent.episode import Episode, PolicyLimits
from hybridflow.data.prompts import PromptRow
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.client import LLMClient
from hybridflow.rollout.engine_replica import EngineReplica

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))

from fake_session import FakeSession as FakeSession

LIMITS = PolicyLimits(max_model_len=400, max_prompt_length=200, request_deadline=60.0, lost_replicas=2)


@contextmanager
def client_of(*sessions: FakeSession) -> Iterator[LLMClient]:
    """A client of replicas, one for each of these sessions."""
    replicas = [EngineReplica(session, name=f"spoken-{number}") for number, session in enumerate(sessions)]
    try:
        yield LLMClient(replicas)
    finally:
        for replica in replicas:
            replica.close()


def episode(
    sample: int = 0, prompt: Sequence[int] = (5, 6), max_tokens: int = 64, group: int = 7, **row: Any
) -> Episode:
    """The episode of one sample, with the facts of its row."""
    facts = {"data_source": "test", "reward_model": {"ground_truth": "4"}, "extra_info": {}, **row}
    return Episode(
        PromptRow(list(prompt), facts, index=0),
        group=group,
        sample=sample,
        group_seed=11,
        seed=100 + sample,
        sampling=SamplingParams(max_tokens),
    )


def says(tokenizer: Any, answer: Callable[[str], str], end: int) -> FakeSession:
    """A session that answers the text of a prompt with a text, once for each request, and its end token."""
    said: dict[int, list[int]] = {}

    def script(request: GenerationRequest) -> list[int]:
        if request.request_id not in said:
            prompt = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
            text = answer(prompt)
            said[request.request_id] = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        return said[request.request_id]

    return FakeSession(script, end=end)
