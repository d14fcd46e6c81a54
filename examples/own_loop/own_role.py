"""A role of your own beside those of the library: its workers share the processes, and read the batch.

prompts ──► rollout ──► responses ──► Repetition: the share of repeated tokens, a column of the batch
"""

from __future__ import annotations

import sys

import torch

from hybridflow import DataProto, PPOConfig
from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import build_requests
from hybridflow.config.load import prepare_config
from hybridflow.controller import Dispatch, RankInfo, Worker, WorkerGroup, register
from hybridflow.data.build import build_prompt_data
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.episodes.planning import sampling_of
from hybridflow.trainer.roles.worker_groups import worker_groups


class Repetition(Worker):
    """Finds responses that repeat themselves."""

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("responses", "response_mask"), writes=("repeated",)
    )
    def measure(self, batch: DataProto) -> DataProto:
        """Return repeated [B] float32: the share of each response's tokens that it has sampled before."""
        shares = []
        for tokens, mask in zip(batch.batch["responses"], batch.batch["response_mask"]):
            sampled = tokens[mask].tolist()
            shares.append(1 - len(set(sampled)) / max(1, len(sampled)))
        return DataProto.from_dict({"repeated": torch.tensor(shares, dtype=torch.float32)})


def build_repetition(info: RankInfo) -> Repetition:
    """Build the worker of one rank, in its process: the place to load a model."""
    return Repetition()


def measured_batch(config: PPOConfig) -> DataProto:
    """Generate the first batch of a run, and return it with the column `repeated`."""
    rollout = config.actor_rollout_ref.rollout
    seed = config.trainer.seed
    tokenizer = load_tokenizer(str(config.data.tokenizer))
    prompts = next(build_prompt_data(config.data, tokenizer, seed).train_loader.endless())
    with worker_groups(config, tokenizer, 1, more={"repetition": build_repetition}) as roles:
        repetition = WorkerGroup[Repetition](roles.actor.backend, "repetition")
        roles.rollout.update_from(roles.actor, version=0)
        requests = build_requests(
            prompts, sampling_of(config, rollout), n=rollout.n, seed=seed, purpose="rollout", step=1
        )
        outputs = roles.rollout.generate(requests.requests).outputs
        made = [requests.trajectory(place, output, tokenizer) for place, output in enumerate(outputs)]
        batch = collate(made, tokenizer.pad_token_id)
        batch |= repetition.call(Repetition.measure, batch)
        return batch


if __name__ == "__main__":
    batch = measured_batch(prepare_config(PPOConfig, sys.argv[1:], recipe="grpo").config)
    print("repeated:", [round(share, 2) for share in batch.batch["repeated"].tolist()])
