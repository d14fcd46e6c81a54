"""The simplest agent: one prompt, `n` responses.

prompt rows ──build_requests──► GenerationRequest × n ──Generate──► GenerationOutput ──collate──► DataProto
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.data.prompts import PromptRow
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams

Generate = Callable[[Sequence[GenerationRequest]], list[GenerationOutput]]
"""What an agent needs of an engine: requests in, outputs in the order of the requests."""


@dataclass(frozen=True)
class RequestBatch:
    """Requests with the prompt row that each stands for; the rows of one prompt are neighbours and share a `uid`."""

    requests: list[GenerationRequest]
    rows: list[PromptRow]
    uids: list[str]


def build_requests(
    prompts: Sequence[PromptRow], sampling: SamplingParams, *, n: int, seed: int, purpose: str, step: int, first_row: int = 0
) -> RequestBatch:
    """`n` requests for each prompt, each with a seed of its own that depends on (seed, purpose, step, row) alone.

    `first_row` is the number of the first row where the prompts are one part of several.
    """
    requests, rows, uids = [], [], []
    for index, prompt in enumerate(prompts):
        for copy in range(n):
            row = first_row + index * n + copy
            key = derive_seed(seed, purpose, step, row)
            requests.append(GenerationRequest(row, tuple(prompt.prompt_token_ids), sampling, key))
            rows.append(prompt)
            uids.append(f"{step}-{first_row + index * n}")
    return RequestBatch(requests, rows, uids)
