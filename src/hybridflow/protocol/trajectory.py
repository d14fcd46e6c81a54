"""The history of a sample, from prompt to reward: calls to the policy, and the rows that follow from them.

    PolicyCall, PolicyCall, … ──rows_of──► Lineage, … ──► Trajectory ──collate──► rows of a DataProto

An agent makes calls and nothing else; `rows_of` alone decides which of them share a row. A sampled token is
never tokenised again: it stays the id that was sampled, with its log-prob and the version of its weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hybridflow.protocol.prompt import Medium, Prompt
from hybridflow.protocol.spans import TraceSpan

FailureCause = Literal["infrastructure", "environment", "data", "deadline", "cancelled"]
"""Why a trajectory has no reward: an engine or a process broke; a tool, an environment or the reward function
raised; its prompt cannot be served; time ran out; it was aborted.
"""


class Sampled(Protocol):
    """The part of an engine's output that rows are made of: three equally long lists."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of the sampled tokens."""

    @property
    def log_probs(self) -> Sequence[float]:
        """Log-probs when sampled, in nats."""

    @property
    def policy_versions(self) -> Sequence[int]:
        """Version of the weights that sampled each token."""


@dataclass(frozen=True)
class PolicyCall:
    """One request to the policy and its output."""

    prompt: Prompt
    output: Sampled
    accepted: bool = True
    """False where the call was retried and only a later try was used."""


@dataclass(frozen=True)
class Segment:
    """Neighbouring tokens of a row that come from one source.

    Example: `Segment((7, 8), True, (-0.1, -2.0), (4, 4))` was sampled by weights of version 4, and
    `Segment((9,))` was given by a template, a tool or an environment.
    """

    token_ids: tuple[int, ...]
    sampled: bool = False
    """Whether the policy sampled the tokens."""
    log_probs: tuple[float, ...] = ()
    """Log-prob of each sampled token, in nats; empty where the tokens were given."""
    versions: tuple[int, ...] = ()
    """Version of the weights that sampled each token; empty where the tokens were given."""
    call: int = 0
    """Number of the call that sampled the tokens, in the order of the trajectory's calls; 0 where given."""

    def __post_init__(self) -> None:
        wanted = len(self.token_ids) if self.sampled else 0
        assert len(self.log_probs) == len(self.versions) == wanted, (
            f"a segment of {len(self.token_ids)} tokens, sampled={self.sampled}, has {len(self.log_probs)} "
            f"log-probs and {len(self.versions)} versions; wanted {wanted} of each"
        )


@dataclass(frozen=True)
class Lineage:
    """One row: all that the policy read and wrote, in order."""

    prompt: Prompt
    segments: tuple[Segment, ...] = ()
    given_media: tuple[Medium, ...] = ()
    """Media in the given segments, behind those of the prompt; places count from the row's first token."""
    routes: NDArray[np.int16] | None = field(default=None, compare=False)
    """Experts [tokens, W] that all tokens but the last went to in generation; None: not recorded."""

    @property
    def media(self) -> tuple[Medium, ...]:
        """All media of the row, in the order of their placeholders."""
        return self.prompt.media + self.given_media

    @property
    def response_ids(self) -> list[int]:
        """Ids of all tokens after the prompt."""
        return list(chain.from_iterable(segment.token_ids for segment in self.segments))

    @property
    def sampled_mask(self) -> list[bool]:
        """For each token after the prompt, whether the policy sampled it."""
        return [segment.sampled for segment in self.segments for _ in segment.token_ids]


@dataclass(frozen=True)
class Outcome:
    """How a trajectory ended."""

    kind: Literal["finished", "truncated", "failed"]
    """Truncated: a limit on its length ended it."""
    cause: FailureCause | None = None
    """Set where it failed, and nowhere else."""
    detail: str = ""
    """What went wrong, for people."""

    def __post_init__(self) -> None:
        assert (self.kind == "failed") == (self.cause is not None), f"an outcome with a wrong cause: {self}"


FINISHED = Outcome("finished")
TRUNCATED = Outcome("truncated")


@dataclass(frozen=True)
class Trajectory:
    """One sample of a group: one or several rows, with one reward."""

    group: int
    """Number of the group, unique in a run."""
    sample: int
    """Number of the sample in its group, from 0."""
    lineages: tuple[Lineage, ...]
    outcome: Outcome = FINISHED
    reward: float | None = None
    """Score of the whole trajectory; None before it is scored, and where it failed."""
    turn_rewards: Mapping[int, float] = field(default_factory=dict)
    """The part of `reward` that belongs to a call, by its number as in `Segment.call`; the rest belongs to
    the end.
    """
    token_rewards: tuple[float, ...] = ()
    """The part of `reward` that belongs to each of `sampled_ids`, all of it; empty where it has one score."""
    turns: int = 1
    """Calls to the policy that were accepted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this trajectory for the trackers."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of its rows by name: facts of the data row, results of the reward."""
    spans: tuple[TraceSpan, ...] = field(default=(), compare=False)
    """The calls, tools, environment and reward that it waited for, in the order of their ends."""

    @property
    def failed(self) -> bool:
        """Whether it failed, so that nothing may be learned from it."""
        return self.outcome.kind == "failed"

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Ids of all tokens that the policy sampled, in the order of its calls."""
        segments = [segment for lineage in self.lineages for segment in lineage.segments if segment.sampled]
        segments.sort(key=lambda segment: segment.call)
        return tuple(chain.from_iterable(segment.token_ids for segment in segments))


def rows_of(calls: Iterable[PolicyCall]) -> tuple[Lineage, ...]:
    """Return the rows that follow from the calls of one trajectory, in the order of their first calls.

    The extension property decides: a call goes on with a row where its prompt begins with exactly all ids of
    that row so far, under the same media. The rest of the prompt, with its media, is then a given segment and
    the output a sampled one. Of several such rows the longest is taken, and of equally long ones the one with
    the newest call. Every other call starts its own row, for which its whole prompt is given. A call without
    sampled tokens, or one that was not accepted, gives nothing. Every other sampled token is in exactly one
    sampled segment.
    """
    rows: list[_GrowingRow] = []
    used = [call for call in calls if call.accepted and call.output.token_ids]
    for number, call in enumerate(used):
        extended = [row for row in rows if row.begins(call.prompt)]
        if extended:
            row = max(extended, key=lambda each: (len(each.units), each.newest_call))
            row.give(call.prompt)
        else:
            row = _GrowingRow(call.prompt)
            rows.append(row)
        row.sample(call.output, number)
    return tuple(Lineage(row.prompt, tuple(row.segments), row.given_media, row.routes) for row in rows)


class _GrowingRow:
    """A row that grows with the calls."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.segments: list[Segment] = []
        self.units = prompt.key
        self.given_media: tuple[Medium, ...] = ()
        self.newest_call = -1
        self.routes: NDArray[np.int16] | None = None

    def begins(self, prompt: Prompt) -> bool:
        """Return whether `prompt` begins with all tokens of this row, under the same media."""
        return prompt.key[: len(self.units)] == self.units

    def give(self, prompt: Prompt) -> None:
        """Add what a prompt that begins with this row has behind it; add nothing where there is nothing."""
        token_ids = prompt.token_ids[len(self.units) :]
        if token_ids:
            self.segments.append(Segment(token_ids))
        self.units = prompt.key
        self.given_media = prompt.media[len(self.prompt.media) :]

    def sample(self, output: Sampled, call: int) -> None:
        """Add tokens that the policy wrote in its call number `call`, from 0."""
        versions = tuple(output.policy_versions)
        token_ids = tuple(output.token_ids)
        self.segments.append(Segment(token_ids, True, tuple(output.log_probs), versions, call))
        self.units += token_ids
        self.newest_call = call
        self.routes = getattr(output, "routes", None)  # of all tokens up to here, and not of every engine
