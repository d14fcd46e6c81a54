"""Runs that learn from comparisons: preference optimisation of a policy, and training of a reward model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from hybridflow.config.data import SFTDataConfig
from hybridflow.config.model import OptimConfig
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.schema import group, key, read_by
from hybridflow.config.trainer import SFTTrainerConfig


@dataclass(frozen=True)
class PreferenceDataConfig(SFTDataConfig):
    """Pairs of answers, of which one is preferred, or answers with labels, and how they become batches."""

    train_batch_size: int = key(
        64, "Pairs in one optimizer step; for kto and process rewards, answers.", minimum=1
    )
    chosen_key: str = key(
        "chosen",
        "Column with the preferred answer: a text, messages, or a transcript of `Human:` and `Assistant:`.",
    )
    rejected_key: str = key("rejected", "Column with the other answer, in the same form.")
    response_key: str = key("completion", "kto without pairs: column with the answer to the prompt.")
    label_key: str = key("label", "kto without pairs: column that is true where the answer is desirable.")


@dataclass(frozen=True)
class RewardDataConfig(PreferenceDataConfig):
    """The data of a reward model."""

    margin_key: str = key(
        "margin", "Column that says by how much the chosen answer is better, where there is one."
    )
    steps_key: str = key("completions", "process: column with the list of an answer's steps.")
    step_labels_key: str = key("labels", "process: column with a label of each step, true or false.")
    step_separator: str = key("\n", "process: text that stands after each step but the last.")


@dataclass(frozen=True)
class PreferenceConfig:
    """The loss of preference optimisation."""

    loss: Literal["dpo", "ipo", "kto", "simpo", "orpo"] = key(
        "dpo", "Loss on the answers; kto weighs each alone, the others compare the two of a pair."
    )
    beta: float | None = key(
        None,
        "dpo, ipo, kto: weight of the distance from the reference model, null: 0.1. simpo: factor of the "
        "mean log-probs, null: 2.0.",
        read_by(".loss!=orpo", "orpo compares odds, and has no factor of them"),
        above=0,
    )
    label_smoothing: float = key(
        0.0,
        "dpo: chance that a pair's labels are swapped; above 0 it is cDPO.",
        read_by(".loss=dpo"),
        minimum=0,
        below=0.5,
    )
    simpo_margin: float = key(
        1.0, "simpo: distance that a pair's rewards should have.", read_by(".loss=simpo"), minimum=0
    )
    odds_weight: float = key(
        0.1, "orpo: weight of the odds ratio beside the likelihood.", read_by(".loss=orpo"), minimum=0
    )
    desirable_weight: float = key(1.0, "kto: weight of desirable answers.", read_by(".loss=kto"), minimum=0)
    undesirable_weight: float = key(
        1.0, "kto: weight of undesirable answers.", read_by(".loss=kto"), minimum=0
    )
    share_prompts: bool = key(
        True, "Compute a prompt once for both answers of a pair; not with sequence parallelism."
    )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with the model as it was at the start."""
        return self.loss in ("dpo", "ipo", "kto")


@dataclass(frozen=True)
class DPOConfig(SFTConfig):
    """A run of preference optimisation (DPO and its kin)."""

    data: PreferenceDataConfig = group(PreferenceDataConfig)
    optim: OptimConfig = group(OptimConfig)
    algorithm: PreferenceConfig = group(PreferenceConfig)
    trainer: SFTTrainerConfig = group(SFTTrainerConfig, project_name="hybridflow-dpo")


@dataclass(frozen=True)
class RewardTrainingConfig:
    """The loss of a reward model."""

    loss: Literal["bradley_terry", "process"] = key(
        "bradley_terry",
        "bradley_terry: a score of each answer, from pairs. process: a score of each step, from labels.",
    )


@dataclass(frozen=True)
class RewardModelConfig(SFTConfig):
    """A run that trains a reward model."""

    data: RewardDataConfig = group(RewardDataConfig)
    algorithm: RewardTrainingConfig = group(RewardTrainingConfig)
    trainer: SFTTrainerConfig = group(SFTTrainerConfig, project_name="hybridflow-reward-model")


def learns_from_pairs(config: SFTConfig) -> bool:
    """Return whether the loss of a run compares the two answers of a pair."""
    if isinstance(config, DPOConfig):
        return config.algorithm.loss != "kto"
    return isinstance(config, RewardModelConfig) and config.algorithm.loss == "bradley_terry"


def takes_single_answers(config: PPOConfig | SFTConfig) -> bool:
    """Return whether a run of preference optimisation needs no pairs."""
    return isinstance(config, DPOConfig) and not learns_from_pairs(config)


def items_per_row(config: PPOConfig | SFTConfig, columns: Collection[str] | None = None) -> int:
    """Return the items that a row of a run's data becomes: for kto both answers of a pair, else one.

    `columns` are those of the row; without them it is taken for a pair.
    """
    if not isinstance(config, DPOConfig) or learns_from_pairs(config):
        return 1
    if columns is not None and config.data.chosen_key not in columns:
        return 1
    return 2


def rows_per_item(config: SFTConfig) -> int:
    """Return the rows that an item of a run's data becomes: the two answers of a comparison, or one."""
    if isinstance(config, DPOConfig) or learns_from_pairs(config):
        return 2
    return 1
