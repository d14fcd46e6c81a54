"""The simplest agent: one prompt, `n` responses, each a trajectory of one call.

prompt rows ──build_requests──► GenerationRequest × n ──engine──► GenerationOutput ──trajectory──► Trajectory
                   └─one_more_each─► one more in each group: a greedy request, or the data's own answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

from hybridflow.agent.collate import GROUPS_PER_STEP
from hybridflow.agent.episode import reward_facts
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import DataError
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.trajectory import (
    FINISHED,
    TRUNCATED,
    FailureCause,
    Lineage,
    Outcome,
    PolicyCall,
    Trajectory,
    rows_of,
)
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams


@dataclass(frozen=True)
class RequestBatch:
    """Requests with their prompt rows, the numbers of their groups, and their numbers in the group; requests
    of one group are neighbours.
    """

    requests: list[GenerationRequest]
    rows: list[PromptRow]
    groups: list[int]
    samples: list[int]

    def __len__(self) -> int:
        return len(self.requests)

    def __add__(self, other: RequestBatch) -> RequestBatch:
        return RequestBatch(
            self.requests + other.requests,
            self.rows + other.rows,
            self.groups + other.groups,
            self.samples + other.samples,
        )

    def chosen(self, flags: Sequence[bool]) -> RequestBatch:
        """Return the requests whose flag is true, with all that belongs to them."""
        return RequestBatch(
            list(compress(self.requests, flags)),
            list(compress(self.rows, flags)),
            list(compress(self.groups, flags)),
            list(compress(self.samples, flags)),
        )

    def trajectory(self, place: int, output: GenerationOutput, tokenizer: Tokenizer) -> Trajectory:
        """Return the trajectory of the request at `place`, with its text and what a reward reads."""
        prompt = self.requests[place].prompt
        # a response without tokens is a row all the same: it is an answer, and is scored like others
        lineages = rows_of([PolicyCall(prompt, output)]) or (Lineage(prompt),)
        text = tokenizer.decode(output.token_ids, skip_special_tokens=True)
        extra = {"solution_str": text, **reward_facts(self.rows[place])}
        group = self.groups[place]
        return Trajectory(group, self.samples[place], lineages, outcome_of(output), extra=extra)

    def failed(self, place: int, cause: FailureCause, detail: str) -> Trajectory:
        """Return the trajectory of the request at `place`, which got no response."""
        outcome = Outcome("failed", cause, detail)
        return Trajectory(
            self.groups[place], self.samples[place], (), outcome, extra=reward_facts(self.rows[place])
        )


def outcome_of(output: GenerationOutput) -> Outcome:
    """Return how a trajectory of one call has ended."""
    if output.finish_reason == "stop":
        return FINISHED
    if output.finish_reason == "length":
        return TRUNCATED
    if output.finish_reason == "abort":
        return Outcome("failed", "cancelled", f"request {output.request_id} was aborted")
    detail = f"request {output.request_id}: {output.error}"
    if output.refused:
        return Outcome("failed", "data", detail)
    return Outcome("failed", "infrastructure", detail)


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
    groups = []
    samples = []
    first_group = step * GROUPS_PER_STEP + first_row // n
    for index, prompt in enumerate(prompts):
        read = prompt.prompt
        for sample in range(n):
            row = first_row + index * n + sample
            key = derive_seed(seed, purpose, step, row)
            requests.append(GenerationRequest(row, read, sampling, key))
            rows.append(prompt)
            groups.append(first_group + index)
            samples.append(sample)
    return RequestBatch(requests, rows, groups, samples)


def one_more_each(
    batch: RequestBatch, sampling: SamplingParams, *, first_row: int, sample: int
) -> RequestBatch:
    """Make one request for each group of `batch`, as its sample number `sample`, numbered from `first_row`.

    It draws nothing (the seed is 0): it is for greedy responses and for rows whose response is known.
    """
    firsts = {group: row for row, group in reversed(list(enumerate(batch.groups)))}
    groups = list(dict.fromkeys(batch.groups))
    rows = [firsts[group] for group in groups]
    requests = [
        GenerationRequest(first_row + number, batch.requests[row].prompt, sampling, 0)
        for number, row in enumerate(rows)
    ]
    return RequestBatch(requests, [batch.rows[row] for row in rows], groups, [sample] * len(groups))


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
