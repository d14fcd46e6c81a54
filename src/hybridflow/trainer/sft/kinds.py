"""The kinds of runs that learn from data as it is: what differs between them, in one table.

SFTConfig   conversations ──► SFTWorker, the likelihood of the assistant's tokens
DPOConfig   comparisons   ──► ComparisonWorker, a preference loss on the log-probs of two answers
RewardModelConfig         ──► ComparisonWorker, a loss on the scores of two answers, or of an answer's steps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hybridflow.config import DPOConfig, RewardModelConfig, SFTConfig
from hybridflow.data.build import LearningData, build_preference_data, build_reward_data, build_sft_data
from hybridflow.data.preference import CHOSEN, Comparison, StepRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.models.files.build import Kind
from hybridflow.protocol import DataProto
from hybridflow.trainer.sft.step import conversation_rows
from hybridflow.workers.comparison import (
    ComparisonGroup,
    ComparisonWorker,
    pair_scores,
    preference_measure,
    step_scores,
)
from hybridflow.workers.sft import SFTGroup, SFTWorker


@dataclass(frozen=True)
class LearningKind:
    """One kind of run."""

    name: str
    """The role of its model, and the kind of its checkpoints."""
    group: type[SFTGroup] | type[ComparisonGroup]
    load_data: Callable[[Any, Tokenizer], LearningData[Any]]
    """(configuration, tokenizer) -> its data."""
    make_rows: Callable[[Sequence[Any], int], DataProto]
    """(items of the data, id of the padding token) -> rows."""
    make_worker: Callable[[Any, TrainEngine, BatchLimits], SFTWorker | ComparisonWorker]
    """(configuration, engine, limits) -> the worker that learns."""
    engine: Callable[[Any], Kind] = lambda config: "policy"
    """configuration -> the kind of model."""
    generates: bool = False
    """Whether a rollout shares the weights, to generate answers for readers."""


def kind_of(config: SFTConfig) -> LearningKind:
    """Return the kind of a run."""
    return _KINDS[type(config)]


def comparison_rows(items: Sequence[Comparison], pad_id: int) -> DataProto:
    """Two rows for each comparison, with `preference` [B] and, where it is known, `ref_log_prob_sum` [B];
    `group_ids` number the comparisons.
    """
    rows = conversation_rows([answer for item in items for answer in item.answers], pad_id)
    columns = {
        "group_ids": torch.arange(len(items)).repeat_interleave(2),
        "preference": torch.tensor([kind for item in items for kind in item.kinds]),
    }
    if items[0].reference:
        columns["ref_log_prob_sum"] = torch.tensor([number for item in items for number in item.reference])
    return rows | DataProto.from_dict(columns)


def reward_rows(items: Sequence[Comparison | StepRow], pad_id: int) -> DataProto:
    """Return the rows of comparisons, with `margin` [B] where the data has it; or one row for each answer,
    with `step_labels` [B, R] where `loss_mask` says that a step ends.
    """
    pairs = [item for item in items if isinstance(item, Comparison)]
    if pairs:
        rows = comparison_rows(pairs, pad_id)
        if pairs[0].margin is not None:
            margins = torch.tensor([item.margin for item in pairs]).repeat_interleave(2)
            rows |= DataProto.from_dict({"margin": margins})
        return rows
    answers = [item for item in items if isinstance(item, StepRow)]
    rows = conversation_rows([item.answer for item in answers], pad_id)
    ends = rows.batch["loss_mask"]
    labels = torch.zeros(ends.shape)
    labels[ends] = torch.tensor([float(label) for item in answers for label in item.labels])
    columns = {
        "step_labels": labels,
        "group_ids": torch.arange(len(answers)),
        "preference": torch.full((len(answers),), CHOSEN),
    }
    return rows | DataProto.from_dict(columns)


def _conversations(config: SFTConfig, tokenizer: Tokenizer) -> LearningData[Any]:
    return build_sft_data(config.data, tokenizer, config.trainer.seed)


def _sft_worker(config: SFTConfig, engine: TrainEngine, limits: BatchLimits) -> SFTWorker:
    return SFTWorker(engine, limits)


def _comparisons(config: DPOConfig, tokenizer: Tokenizer) -> LearningData[Any]:
    single = config.algorithm.loss == "kto"
    return build_preference_data(config.data, tokenizer, config.trainer.seed, single=single)


def _preference_worker(config: DPOConfig, engine: TrainEngine, limits: BatchLimits) -> ComparisonWorker:
    paired = config.algorithm.loss != "kto"
    # ranks that share rows hold each prompt as often as it has answers
    sharing = config.algorithm.share_prompts and config.engine.ulysses_sequence_parallel_size == 1
    limits = replace(limits, keep_groups=paired, share_prompts=paired and sharing)
    measure = preference_measure(config.algorithm)
    return ComparisonWorker(engine, OutputSpec(log_probs=True), measure, limits)


def _reward_data(config: RewardModelConfig, tokenizer: Tokenizer) -> LearningData[Any]:
    steps = config.algorithm.loss == "process"
    return build_reward_data(config.data, tokenizer, config.trainer.seed, steps=steps)


def _reward_engine(config: RewardModelConfig) -> Kind:
    return "token_score" if config.algorithm.loss == "process" else "score"


def _reward_worker(config: RewardModelConfig, engine: TrainEngine, limits: BatchLimits) -> ComparisonWorker:
    if config.algorithm.loss == "process":
        return ComparisonWorker(engine, OutputSpec(scores=True), step_scores, limits)
    return ComparisonWorker(engine, OutputSpec(scores=True), pair_scores, replace(limits, keep_groups=True))


_KINDS = {
    SFTConfig: LearningKind("sft", SFTGroup, _conversations, conversation_rows, _sft_worker, generates=True),
    DPOConfig: LearningKind("dpo", ComparisonGroup, _comparisons, comparison_rows, _preference_worker),
    RewardModelConfig: LearningKind(
        "reward_model", ComparisonGroup, _reward_data, reward_rows, _reward_worker, engine=_reward_engine
    ),
}
