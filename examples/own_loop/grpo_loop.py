"""GRPO as a loop of your own on the library's worker groups; docs/programming_guide.md explains it.

prompts ──► rollout ──► responses ──► score ──► actor, reference: log-probs ──► advantages ──► actor: update
               ▲                                                                                   │
               └────────────────────────────── weights ◄───────────────────────────────────────────┘

Its losses and weights are those of `hybridflow train --recipe grpo` to the bit, in one process and under Ray.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hybridflow import DataProto, PPOConfig
from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import build_requests
from hybridflow.algorithms.advantages.grpo import grpo
from hybridflow.config.load import prepare_config
from hybridflow.data.build import build_prompt_data
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.episodes.planning import sampling_of
from hybridflow.trainer.ppo.columns import group_ids
from hybridflow.trainer.ppo.data_metrics import batch_metrics
from hybridflow.trainer.roles.worker_groups import worker_groups
from hybridflow.trainer.run import huggingface_writer
from hybridflow.workers import ReferenceWorker
from hybridflow.workers.mini_batches import MiniBatchPlan

FAST = "actor_rollout_ref.rollout.exact=false"
"""The loop computes the old log-probs itself, so it has no use for exact mode, which saves that pass."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Give the share of the response's characters that are digits; a run can name this function too."""
    return sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))


def train(config: PPOConfig, steps: int) -> Iterator[dict[str, float]]:
    """Train for so many steps; yield the metrics of each, and write the model at the end."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    seed = config.trainer.seed
    tokenizer = load_tokenizer(str(config.data.tokenizer))
    prompt_batches = build_prompt_data(config.data, tokenizer, seed).train_loader.endless()
    with worker_groups(config, tokenizer, steps) as roles:
        roles.rollout.update_from(roles.actor, version=0)
        for step, prompts in enumerate(islice(prompt_batches, steps), start=1):
            # generate: n responses to each prompt, whose draws depend on (seed, step, row) alone
            requests = build_requests(
                prompts, sampling_of(config, rollout), n=rollout.n, seed=seed, purpose="rollout", step=step
            )
            outputs = roles.rollout.generate(requests.requests).outputs
            # score, and make a batch of rows
            trajectories = []
            for place, output in enumerate(outputs):
                made = requests.trajectory(place, output, tokenizer)
                trajectories.append(replace(made, reward=compute_score(**made.extra)))
            batch = collate(trajectories, tokenizer.pad_token_id)
            # log-probs of the sampled tokens, under the weights so far and under the first ones
            batch |= roles.actor.log_probs(batch)
            if roles.reference:
                batch |= roles.reference.call(ReferenceWorker.log_probs, batch)
            # advantages: the maths is a pure function of tensors
            scores = batch.batch["token_level_scores"]
            normalises = config.algorithm.norm_adv_by_std_in_grpo
            found = grpo(scores, batch.batch["response_mask"], group_ids(batch), norm_by_std=normalises)
            columns = {
                "token_level_rewards": scores,
                "advantages": found.advantages,
                "returns": found.returns,
            }
            batch |= DataProto.from_dict(columns)
            # update: an optimizer step for each mini-batch
            metrics = batch_metrics(batch, has_critic=False)
            plan = MiniBatchPlan(actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle, seed, step)
            metrics.update(roles.actor.update(batch, plan))
            # publish the weights to whoever generates with a copy of its own
            roles.rollout.update_from(roles.actor, version=step)
            yield metrics.to_floats()
        huggingface_writer(roles.actor, tokenizer)(Path(config.trainer.default_local_dir) / "model", True)


def main(words: list[str]) -> None:
    """Train by the keys of a command line, and print a line for each step."""
    config = prepare_config(PPOConfig, [FAST, *words], recipe="grpo").config
    steps = config.trainer.total_training_steps or 10
    for step, metrics in enumerate(train(config, steps), start=1):
        shown = [f"{name} {metrics[name]:.4f}" for name in ("critic/score/mean", "actor/pg_loss")]
        print(f"step {step}:", " · ".join(shown))


if __name__ == "__main__":
    main(sys.argv[1:])
