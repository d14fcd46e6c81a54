"""The simplest agent: one prompt, `n` responses.

prompt rows ──build_requests──► GenerationRequest × n ──Generate──► GenerationOutput ──collate──► DataProto
                   └─one_more_each─► one more in each group: a greedy request, or the data's own answer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hybridflow.data.prompts import PromptRow
from hybridflow.errors import DataError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams

Generate = Callable[[Sequence[GenerationRequest]], list[GenerationOutput]]
"""The part of an engine that an agent needs: requests in, outputs in the order of the requests."""


@dataclass(frozen=True)
class RequestBatch:
    """Requests with their prompt rows and `uid`s; rows of one prompt are neighbours and share a `uid`."""

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
    """Make `n` requests for each prompt, each with a seed that depends on (seed, purpose, step, row) alone.

    `first_row` is the number of the first row where the prompts are one part of several.
    """
    requests = []
    rows = []
    uids = []
    for index, prompt in enumerate(prompts):
        for copy in range(n):
            row = first_row + index * n + copy
            key = derive_seed(seed, purpose, step, row)
            requests.append(GenerationRequest(row, Prompt(tuple(prompt.prompt_token_ids)), sampling, key))
            rows.append(prompt)
            uids.append(f"{step}-{first_row + index * n}")
    return RequestBatch(requests, rows, uids)


def one_more_each(batch: RequestBatch, sampling: SamplingParams, *, first_row: int) -> RequestBatch:
    """Make one request for each group of `batch`, with its prompt and its `uid`, numbered from `first_row`.

    It draws nothing (the seed is 0): it is for greedy responses and for rows whose response is known.
    """
    firsts = {uid: row for row, uid in reversed(list(enumerate(batch.uids)))}
    uids = list(dict.fromkeys(batch.uids))
    rows = [firsts[uid] for uid in uids]
    requests = [
        GenerationRequest(first_row + number, batch.requests[row].prompt, sampling, 0)
        for number, row in enumerate(rows)
    ]
    return RequestBatch(requests, [batch.rows[row] for row in rows], uids)


def demonstration_outputs(batch: RequestBatch) -> list[GenerationOutput]:
    """Return the data's own answers as if they had been generated.

    Their log-probs are 0, the version of their weights is -1, and they finish by "stop". Raises DataError for
    a prompt row without an answer.
    """
    outputs = []
    for request, row in zip(batch.requests, batch.rows, strict=True):
        tokens = row.demonstration_token_ids
        if tokens is None:
            raise DataError(
                f"the prompt row {row.index} has no answer from the data to learn from: build the data with "
                "demonstrations=True"
            )
        outputs.append(
            GenerationOutput(
                request.request_id, list(tokens), [0.0] * len(tokens), "stop", [-1] * len(tokens)
            )
        )
    return outputs
