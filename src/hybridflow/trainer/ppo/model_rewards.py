"""The score of a reward model joins that of the reward function, where `reward.terms` has a reward_model.

    requests ──► the reward function ──► outcomes ──────────────┐
        └─messages──► the model's template and tokens ──► RewardModelGroup ──► score + weight · value

The model has its own tokenizer and chat template. Of a conversation it reads the messages, in its own
template; of a prompt that is a text, the text as a user's message. All trajectories of a generation call are
scored together, when they have ended, so that the model may share the devices of the others. A process reward
model scores the steps of the last answer; the text up to the end of a step says which of the policy's tokens
gets the step's part of the score.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridflow.config.reward import RewardConfig, RewardModelRoleConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.sft import encode_conversation
from hybridflow.data.tokenizer import Tokenizer, encode_rendered, load_tokenizer
from hybridflow.errors import ModelError, RewardError
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.rewards.compose import Condition, model_term
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.result import OpenScoring, Scorer, ScoreRequest, ScoringOutcome
from hybridflow.workers.reward_model import SCORES, RewardModelGroup

REDUCTIONS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "sum": math.fsum,
    "min": min,
    "last": lambda values: values[-1],
    "product": math.prod,
}
"""The score of a response from those of its steps, by `step_reduce`."""


def add_reward_model(
    rewards: RewardManager,
    group: RewardModelGroup,
    config: RewardConfig,
    policy_tokenizer: Tokenizer,
    alone: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Complete the reward function's outcomes by the reward model of `config`.

    `alone` is the context in which it has its devices for itself. Raises ModelError for a tokenizer without a
    chat template.
    """
    model = config.reward_model.model
    path = str(model.tokenizer_path or model.path)
    tokenizer = load_tokenizer(path, model.trust_remote_code)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer {path} of the reward model has no chat template, so conversations cannot be "
            "shown to it: set reward.reward_model.model.tokenizer_path to one that has"
        )
    reader = ModelReader(tokenizer, config.reward_model)
    rewards.add_scorer(lambda scorer: ModelScorer(scorer, group, reader, config, policy_tokenizer, alone))


@dataclass(frozen=True)
class Reading:
    """What a reward model reads of a request."""

    before: list[int]
    """Ids before the tokens of `scored`."""
    scored: list[int]
    """Ids from the first one on that may have a score."""
    ends: list[int]
    """Places in `scored` at which the model is asked for a score: of the response, or of each step."""
    characters: list[int]
    """Number of the response's characters up to the end of each step."""


@dataclass(frozen=True)
class ModelReader:
    """The conversion of requests into the tokens of a reward model."""

    tokenizer: Tokenizer
    config: RewardModelRoleConfig

    def read(self, request: ScoreRequest) -> Reading:
        """Return the tokens that the model reads; RewardError for a conversation that it cannot read."""
        try:
            reading = self._steps(request) if self.config.kind == "token_score" else self._whole(request)
        except Exception as error:  # a template is a program of the model's: anything may come out of it
            raise RewardError(
                f"the reward model cannot read the conversation: {error}. With "
                "reward.reward_model.read_to=end it reads all that its chat template writes"
            ) from error
        length = len(reading.before) + len(reading.scored)
        most = self.config.max_length
        assert most is not None, "filled by resolve"
        if not reading.before or not reading.scored or length > most:
            raise RewardError(
                f"the reward model would read {len(reading.before)} tokens and then {len(reading.scored)} of "
                "the response, wanted at least one of each and at most "
                f"reward.reward_model.max_length={most}"
            )
        return reading

    def _whole(self, request: ScoreRequest) -> Reading:
        template = ChatTemplate(self.tokenizer)
        if self.config.read_to == "end":
            text = template.render(template.as_text(request.messages), add_generation_prompt=False)
            ids = template.encode(text)
        else:
            ids, learned = encode_conversation(template, request.messages)
            ids = ids[: len(learned) - learned[::-1].index(1)]
        return Reading(ids[:-1], ids[-1:], [0], [len(request.solution_str)])

    def _steps(self, request: ScoreRequest) -> Reading:
        """Tokenise each step with its separator by itself, as the training of a process reward model does.

        A response without a text is one empty step.
        """
        asked = request.messages
        if asked and asked[-1].get("role") == "assistant":
            asked = asked[:-1]
        separator = self.config.step_separator
        pieces = re.split(f"(?<={re.escape(separator)})", request.solution_str or separator)
        reading = Reading(ChatTemplate(self.tokenizer).begin(asked), [], [], [])
        read = 0
        for piece in pieces:
            read += len(piece)
            if ids := encode_rendered(self.tokenizer, piece):
                reading.scored.extend(ids)
                reading.ends.append(len(reading.scored) - 1)
                reading.characters.append(read)
        return reading


class ModelScorer:
    """A `Scorer` that adds a reward model's scores to the outcomes of another."""

    def __init__(
        self,
        inner: Scorer,
        group: RewardModelGroup,
        reader: ModelReader,
        config: RewardConfig,
        policy_tokenizer: Tokenizer,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._alone = alone
        term = model_term(config.terms)
        self._inner = inner
        self._group = group
        self._reader = reader
        self._policy_tokenizer = policy_tokenizer
        self._column: str = term.column
        self._weight: float = term.weight
        self._condition: Condition | None = term.condition

    def open(self) -> OpenScoring:
        """Open the scoring of requests that come one by one."""
        return _Open(self, self._inner.open())

    def close(self) -> None:
        """End the other scorer; the model's processes are the run's."""
        self._inner.close()

    def complete(
        self, requests: Sequence[ScoreRequest], found: Sequence[ScoringOutcome]
    ) -> list[ScoringOutcome]:
        """Return the outcomes with weight · value added where the term applies."""
        outcomes = list(found)
        readings: dict[int, Reading] = {}
        for place, (request, outcome) in enumerate(zip(requests, found, strict=True)):
            if outcome.error:
                continue
            outcomes[place] = replace(outcome, extras={**outcome.extras, self._column: None})
            try:
                if self._condition is None or self._condition.holds(outcome.extras):
                    readings[place] = self._reader.read(request)
            except RewardError as error:
                outcomes[place] = ScoringOutcome(error="RewardError", detail=str(error))
        scores = self._scores(list(readings.values()))
        for (place, reading), values in zip(readings.items(), scores, strict=True):
            if all(map(math.isfinite, values)):
                outcomes[place] = self._with(found[place], requests[place], reading, values)
            else:
                detail = f"the reward model returned {values}; wanted finite numbers"
                outcomes[place] = ScoringOutcome(error="RewardError", detail=detail)
        return outcomes

    def _with(
        self, outcome: ScoringOutcome, request: ScoreRequest, reading: Reading, values: list[float]
    ) -> ScoringOutcome:
        """Return the outcome with the scores of a response's steps, or its one score."""
        reduce = self._reader.config.step_reduce
        whole = REDUCTIONS[reduce](values)
        extras = {**outcome.extras, self._column: whole}
        score = outcome.score + self._weight * whole
        spread = len(values) > 1 and reduce in ("mean", "sum")
        if not request.response_ids or not (spread or outcome.token_scores):
            return replace(outcome, score=score, extras=extras)
        each = list(outcome.token_scores)
        if not each:
            each = [0.0] * len(request.response_ids)
            each[-1] = outcome.score
        if spread:
            share = self._weight / (len(values) if reduce == "mean" else 1)
            for value, end in zip(values, reading.characters, strict=True):
                each[self._token_at(request, end)] += share * value
        else:
            each[-1] += self._weight * whole
        return replace(outcome, score=score, extras=extras, token_scores=tuple(each))

    def _token_at(self, request: ScoreRequest, characters: int) -> int:
        """Return the index of the policy's token with which `characters` characters are complete.

        The response is the end of what all tokens write, where there were several calls.
        """
        ids = request.response_ids
        started = len(self._decode(ids)) - len(request.solution_str)

        def written(count: int) -> int:
            return len(self._decode(ids[:count])) - started

        return min(bisect_left(range(len(ids) + 1), characters, key=written), len(ids)) - 1

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._policy_tokenizer.decode(list(ids), skip_special_tokens=True))

    def _scores(self, readings: Sequence[Reading]) -> list[list[float]]:
        """Return the model's scores at the ends of each reading."""
        if not readings:
            return []
        pad = int(self._reader.tokenizer.pad_token_id)
        columns: dict[str, Any] = make_rows(
            [reading.before for reading in readings],
            [reading.scored for reading in readings],
            pad,
            response_masks=[
                [int(place in reading.ends) for place in range(len(reading.scored))] for reading in readings
            ],
        )
        columns["row_id"] = torch.arange(len(readings))
        with self._alone():
            scores = self._group.score(DataProto.from_dict(columns)).batch[SCORES]
        if self._reader.config.activation == "sigmoid":
            scores = scores.sigmoid()
        return [row[reading.ends].tolist() for row, reading in zip(scores, readings, strict=True)]


class _Open:
    """Requests of which the other scorer has begun its part."""

    def __init__(self, scorer: ModelScorer, inner: OpenScoring) -> None:
        self._scorer = scorer
        self._inner = inner
        self._requests: list[ScoreRequest] = []

    def add(self, request: ScoreRequest) -> None:
        self._requests.append(request)
        self._inner.add(request)

    def outcomes(self) -> list[ScoringOutcome]:
        return self._scorer.complete(self._requests, self._inner.outcomes())

    def close(self) -> None:
        self._inner.close()
