"""The simplest agent: one prompt, `n` responses.

prompt rows ──build_requests──► GenerationRequest × n ──Generate──► GenerationOutput ──collate──► DataProto
                                     └─one_more_each─► a greedy request, or a row for the data's own answer,
                                     in each group
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.data.prompts import PromptRow
from hybridflow.errors import DataError
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams

Generate = Callable[[Sequence[GenerationRequest]], list[GenerationOutput]]
"""What an agent needs of an engine: requests in, outputs in the order of the requests."""


@dataclass(frozen=True)
class RequestBatch:
    """Requests with the prompt row that each stands for; the rows of one prompt are neighbours and share a
    `uid`.
    """

    requests: list[GenerationRequest]
    rows: list[PromptRow]
    uids: list[str]

    def __len__(self) -> int:
        return len(self.requests)

    def __add__(self, other: RequestBatch) -> RequestBatch:
        return RequestBatch(self.requests + other.requests, self.rows + other.rows, self.uids + other.uids)


def build_requests(
    prompts: Sequence[PromptRow],
    sampling: SamplingParams,
    *,
    n: int,
    seed: int,
    purpose: str,
    step: int,
    first_row: int = 0,
) -> RequestBatch:
    """`n` requests for each prompt, each with a seed of its own that depends on (seed, purpose, step, row)
    alone.

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


def one_more_each(batch: RequestBatch, sampling: SamplingParams, *, first_row: int) -> RequestBatch:
    """One request for each group of `batch`, with its prompt and its `uid`, numbered from `first_row`.

    It draws nothing (the seed is 0): it is for greedy responses and for rows whose response is known.
    """
    firsts = {uid: row for row, uid in reversed(list(enumerate(batch.uids)))}
    uids = list(dict.fromkeys(batch.uids))
    rows = [firsts[uid] for uid in uids]
    requests = [
        GenerationRequest(first_row + number, batch.requests[row].prompt_token_ids, sampling, 0)
        for number, row in enumerate(rows)
    ]
    return RequestBatch(requests, [batch.rows[row] for row in rows], uids)


def demonstration_outputs(batch: RequestBatch) -> list[GenerationOutput]:
    """The data's own answers as if they had been generated: log-probs 0, weights' version -1, finished by
    "stop".

    Raises DataError for a prompt row without an answer.
    """
    outputs = []
    for request, row in zip(batch.requests, batch.rows, strict=True):
        tokens = row.demonstration_token_ids
        if tokens is None:
            raise DataError(
                f"the prompt row {row.index} has no answer of the data to learn from: build the data with "
                "demonstrations"
            )
        outputs.append(
            GenerationOutput(
                request.request_id, list(tokens), [0.0] * len(tokens), "stop", [-1] * len(tokens)
            )
        )
    return outputs
