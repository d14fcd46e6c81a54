"""The score of a reward model joins that of the reward function, where `reward.terms` has a reward_model.

    requests ──► the reward function ──► outcomes ──────────────┐
        └─messages──► the model's template and tokens ──► RewardModelGroup ──► score + weight · value

The model has a tokenizer and a chat template of its own. Of a conversation it reads the messages, in its own
template; of a prompt that is a text, the text as a user's message. All trajectories of a generation call are
scored together, when they have ended, so that the model may share the devices of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridflow.config.reward import RewardConfig, RewardModelConfig
from hybridflow.data.tokenizer import Tokenizer, encode_rendered, load_tokenizer, render_chat
from hybridflow.errors import ModelError, RewardError
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.rewards.compose import Condition, model_term
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.request import OpenScoring, Outcome, Scorer, ScoreRequest
from hybridflow.workers.reward_model import SCORES, RewardModelGroup


def add_reward_model(rewards: RewardManager, group: RewardModelGroup, config: RewardConfig) -> None:
    """Have the outcomes of the reward function completed by the reward model of `config`.

    Raises ModelError for a tokenizer without a chat template.
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
    rewards.add_scorer(lambda scorer: ModelScorer(scorer, group, reader, config))


@dataclass(frozen=True)
class ModelReader:
    """The tokens that a reward model reads of a conversation, and where it is asked for a score."""

    tokenizer: Tokenizer
    config: RewardModelConfig

    def read(self, request: ScoreRequest) -> list[int]:
        """Return the ids of a conversation; RewardError where it is none that the model can read."""
        messages = list(request.messages)
        try:
            ids = encode_rendered(
                self.tokenizer, render_chat(self.tokenizer, messages, add_generation_prompt=False)
            )
        except Exception as error:  # a template is a program of the model's: anything may come out of it
            raise RewardError(f"the reward model's chat template failed: {error}") from error
        if not 1 < len(ids) <= self.config.max_length:
            raise RewardError(
                f"the reward model would read {len(ids)} tokens, wanted 2 to "
                f"reward.reward_model.max_length={self.config.max_length}"
            )
        return ids


class ModelScorer:
    """A `Scorer` that adds a reward model's scores to the outcomes of another."""

    def __init__(
        self, inner: Scorer, group: RewardModelGroup, reader: ModelReader, config: RewardConfig
    ) -> None:
        term = model_term(config.terms)
        self._inner = inner
        self._group = group
        self._reader = reader
        self._column: str = term.column
        self._weight: float = term.weight
        self._condition: Condition | None = term.condition

    def open(self) -> OpenScoring:
        """Begin to score requests that come one by one."""
        return _Open(self, self._inner.open())

    def close(self) -> None:
        """End the other scorer; the model's processes are the run's."""
        self._inner.close()

    def complete(self, requests: Sequence[ScoreRequest], found: Sequence[Outcome]) -> list[Outcome]:
        """Return the outcomes with weight · value added where the term applies."""
        outcomes = list(found)
        rows: dict[int, list[int]] = {}
        for place, (request, outcome) in enumerate(zip(requests, found, strict=True)):
            if outcome.error:
                continue
            try:
                applies = self._condition is None or self._condition.holds(outcome.extras)
                outcomes[place] = self._with(outcome, None)
                if applies:
                    rows[place] = self._reader.read(request)
            except RewardError as error:
                outcomes[place] = Outcome(error="RewardError", detail=str(error))
        for place, value in zip(rows, self._scores(list(rows.values())), strict=True):
            outcomes[place] = self._with(found[place], value)
        return outcomes

    def _with(self, outcome: Outcome, value: float | None) -> Outcome:
        extras = {**outcome.extras, self._column: value}
        if value is None:
            return replace(outcome, extras=extras)
        return replace(outcome, score=outcome.score + self._weight * value, extras=extras)

    def _scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the model's score of each row."""
        if not rows:
            return []
        pad = int(self._reader.tokenizer.pad_token_id)
        columns: dict[str, Any] = make_rows([ids[:-1] for ids in rows], [ids[-1:] for ids in rows], pad)
        columns["row_id"] = torch.arange(len(rows))
        scores: list[float] = self._group.score(DataProto.from_dict(columns)).batch[SCORES].sum(-1).tolist()
        return scores


class _Open:
    """Requests of which the other scorer has begun its part."""

    def __init__(self, scorer: ModelScorer, inner: OpenScoring) -> None:
        self._scorer = scorer
        self._inner = inner
        self._requests: list[ScoreRequest] = []

    def add(self, request: ScoreRequest) -> None:
        self._requests.append(request)
        self._inner.add(replace(request, messages=()))

    def outcomes(self) -> list[Outcome]:
        return self._scorer.complete(self._requests, self._inner.outcomes())

    def close(self) -> None:
        self._inner.close()
