"""The sizes of a step and the schedule in words follow the keys: numbers are those of a count by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.explain import explain, num_training_steps
from hybridflow.config.load import load_config
from hybridflow.config.preference import PreferenceConfig, RewardTrainingConfig
from hybridflow.config.resolve import resolve
from hybridflow.explain.run import schedule_lines

STEP = [
    "data.train_batch_size=64",
    "data.max_prompt_length=100",
    "data.max_response_length=156",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "trainer.total_epochs=3",
]


def ppo(*overrides: str) -> PPOConfig:
    loaded = load_config(PPOConfig, [*STEP, *overrides])
    return resolve(loaded.config, loaded.given)[0]


CASES = """
a synchronous step:
sequences per step: 256 (
tokens per step, at most: 65,536 (256 × (data.max_prompt_length=100 + data.max_response_length=156 = 256
mini-batches per step: 4 (
optimizer steps per step: 8 (
training steps: 9 (trainer.total_epochs=3 × (training rows // 64
optimizer steps in all: 72 (
schedule: sync (a batch is generated between two updates
not responses generated per step
not staleness of a token, at most

a long context of a single turn: actor_rollout_ref.rollout.max_model_len=1024
tokens per step, at most: 65,536 (

agents without a long context: actor_rollout_ref.rollout.multi_turn.enable=true
tokens per step, at most: 65,536 (

agents: actor_rollout_ref.rollout.max_model_len=1024 actor_rollout_ref.rollout.multi_turn.enable=true \
actor_rollout_ref.rollout.multi_turn.max_assistant_turns=6
tokens per step, at most: 262,144 (
tokens of a whole conversation, at most: 1,024 (
turns of the model in a conversation, at most: 6 (

dynamic sampling: algorithm.filter_groups.enable=true data.gen_batch_size=24 \
algorithm.filter_groups.max_num_gen_batches=5
sequences per step: 256 (
responses generated per step, at least: 288 (3 generation batches of data.gen_batch_size=24 × rollout.n=4
responses generated per step, at most: 480 (
training steps: 6 (trainer.total_epochs=3 × (training rows // 72

ReMax: algorithm.adv_estimator=remax data.gen_batch_size=24
sequences per step: 256 (
responses generated per step: 320 (
training steps: 9 (

SPIN: algorithm.adv_estimator=spin
sequences per step: 320 (
responses generated per step: 256 (

collectors: trainer.num_collectors=3 trainer.controller=ray
groups are played by: 3 collectors (

a replay buffer: algorithm.use_pf_ppo=true algorithm.pf_ppo.max_age=3 data.train_batch_size=8 \
data.max_response_length=200 algorithm.rollout_correction.rollout_is=token
rows of earlier steps that a step may draw, at most: 96 (algorithm.pf_ppo.max_age=3 batches: every pass \
reads 4 batches, an update one
replay buffer in the driver's memory, at most: 816 KiB (estimate: rows × (17 B a prompt token + 35 B a
the loss corrects rows of earlier steps by: weights: the policy at the start of the step over the one that \
sampled (algorithm.rollout_correction.rollout_is=token

an age without a buffer: algorithm.pf_ppo.max_age=3
not replay buffer in the driver's memory, at most

an exact schedule: trainer.schedule=exact_async trainer.async.run_ahead=2 \
algorithm.rollout_correction.rollout_is=token
schedule: exact_async (batches are generated whole beside training, each by the weights of 2 training steps
staleness of a token, at most: 2 (
groups generated and not yet trained, at most: 192 (
new weights wait for: the groups of their batch (
the loss corrects stale tokens by: weights: the policy at the start of the step over the one that sampled

a continuous schedule: trainer.schedule=fully_async trainer.async.run_ahead=0.5 \
algorithm.rollout_correction.rollout_is=token
staleness of a token, at most: 2 (
groups generated and not yet trained, at most: 96 (
new weights wait for: the next token (

whole responses: trainer.schedule=colocated_async trainer.async.partial_rollout=false \
algorithm.rollout_correction.rollout_is=token
new weights wait for: all responses that were begun (

nothing is generated ahead: trainer.schedule=fully_async trainer.async.run_ahead=0
staleness of a token, at most: 0 (
not the loss corrects stale tokens by
"""
"""Each case: its name and its overrides, beginnings of lines that are printed, labels that are not."""


@pytest.mark.parametrize("case", CASES.strip().split("\n\n"), ids=lambda case: case.partition(":")[0])
def test_sizes_and_schedule(case: str) -> None:
    head, *wanted = case.splitlines()
    config = ppo(*head.partition(":")[2].split())
    lines = [*explain(config, 200), *schedule_lines(config)]
    assert all(line.how for line in lines)
    printed = [f"{line.label}: {line.value} ({line.how})" for line in lines]
    for text in wanted:
        begin = text.removeprefix("not ")
        found = any(line.startswith(f"{begin}:" if begin != text else begin) for line in printed)
        assert found == (begin == text), (text, printed)


@pytest.mark.parametrize(
    ("config", "rows", "wanted"),
    [
        (SFTConfig(), 1000, {"training steps": "3", "conversations per step": "256"}),
        (
            DPOConfig(),
            1000,
            {"conversations per step": "128", "tokens per step, at most": f"{128 * 1024:,}"},
        ),
        (
            RewardModelConfig(algorithm=RewardTrainingConfig(loss="process")),
            None,
            {"conversations per step": "64"},
        ),
    ],
)
def test_sizes_of_supervised_steps(config: Any, rows: int | None, wanted: dict[str, str]) -> None:
    shown = {line.label: line.value for line in explain(resolve(config)[0], rows)}
    assert wanted.items() <= shown.items()


def test_training_steps_come_from_the_key_the_rows_or_the_task() -> None:
    assert num_training_steps(ppo(), None) is None
    assert num_training_steps(ppo("trainer.total_training_steps=5"), 200) == 5
    assert num_training_steps(ppo("data.task.name=arithmetic_chain", "data.task.size=640"), None) == 30
    assert num_training_steps(ppo("data.train_max_samples=128"), 1000) == 6
    assert num_training_steps(resolve(DPOConfig())[0], 1000) == 1000 // 64
    kto = resolve(DPOConfig(algorithm=PreferenceConfig(loss="kto")))[0]
    steps = [num_training_steps(kto, 1000, columns) for columns in (None, ["chosen"], ["label"])]
    assert steps == [2 * 1000 // 64, 2 * 1000 // 64, 1000 // 64]
