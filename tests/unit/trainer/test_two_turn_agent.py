"""An agent of two turns with a tool between them, written here and not in the library: its rows train, one
for each trajectory or, where the second prompt does not begin with the first row, two.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from tiny_trainer import actor_module, build, ppo_config
from torch import Tensor

from hybridflow.agent.collate import collate
from hybridflow.data.prompts import PromptRow
from hybridflow.models.attention.layouts import ATTENTION_NAME
from hybridflow.protocol import DataProto
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.protocol.trajectory import PolicyCall, Trajectory, rows_of
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.client import LLMClient
from hybridflow.trainer.ppo.build import PPOTrainer

SAMPLES = 2
TURN = SamplingParams(max_tokens=4, ignore_eos=True)


class TwoTurnAgent:
    """Asks the policy, runs a tool on what it wrote, and asks again with the tool's tokens in the prompt.

    With `forgets` it leaves the first token that the policy wrote out of the second prompt.
    """

    def __init__(self, trainer: PPOTrainer, *, forgets: bool) -> None:
        self.forgets = forgets
        self.rollout = trainer.source.roles.rollout
        self.tokenizer = trainer.source.pipeline.tokenizer

    def tool(self, token_ids: list[int]) -> list[int]:
        text = f" = {sum(token_ids) % 97} ."
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def trajectory(self, client: LLMClient, number: int, prompt: PromptRow) -> Trajectory:
        context = list(prompt.prompt_token_ids)
        calls = []
        for turn in range(2):
            seed = derive_seed(0, "turns", number, turn)
            request = GenerationRequest(2 * number + turn, Prompt(tuple(context)), TURN, seed)
            output = await client.generate(request, sticky=number)
            calls.append(PolicyCall(request.prompt, output))
            context += output.token_ids[int(self.forgets) :] + self.tool(output.token_ids)
        reward = float(number % 2) + number
        return Trajectory(*divmod(number, SAMPLES), rows_of(calls), reward=reward, turns=2)

    def trajectories(self, prompts: list[PromptRow]) -> list[Trajectory]:
        each = [prompt for prompt in prompts for _ in range(SAMPLES)]

        async def all_at_once(client: LLMClient) -> list[Trajectory]:
            return await asyncio.gather(*(self.trajectory(client, *pair) for pair in enumerate(each)))

        return self.rollout.run(all_at_once)[0]


def loss_by_hand(trainer: PPOTrainer, batch: DataProto) -> Tensor:
    """−Σ A · log π over sampled tokens / their number, row by row with plain logits; A as in GRPO, of
    trajectories whose number of rows is the same.
    """
    samples = len(batch.batch["trajectory_id"].unique())
    scores = batch.batch["token_level_scores"].view(samples, -1).sum(-1).view(-1, SAMPLES)
    spread = scores.std(-1, keepdim=True) + 1e-6
    advantages = ((scores - scores.mean(-1, keepdim=True)) / spread).flatten()
    total = torch.zeros(())
    for row, advantage in enumerate(advantages.repeat_interleave(len(batch) // samples)):
        attended = batch.batch["attention_mask"][row]
        ids = batch.batch["input_ids"][row][attended][None]
        response = batch.batch["response_mask"][row][attended[batch.batch["prompts"].shape[1] :]]
        sampled = torch.zeros(ids.shape[1], dtype=torch.bool)
        sampled[ids.shape[1] - len(response) :] = response
        log_probs = logits(trainer, ids)[0].float().log_softmax(-1)
        chosen = log_probs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        total = total - advantage * chosen[sampled[1:]].sum()
    return total / batch.batch["response_mask"].sum()


def logits(trainer: PPOTrainer, ids: Tensor) -> Tensor:
    """Logits of one row under an attention that transformers computes."""
    hf = actor_module(trainer).hf
    hf.set_attn_implementation("eager")
    try:
        found: Tensor = hf(input_ids=ids).logits
    finally:
        hf.set_attn_implementation(ATTENTION_NAME)
    return found


@pytest.mark.parametrize("forgets", [False, True])
def test_two_turns_with_a_tool_train_on_sampled_tokens_only(
    model: Path, tmp_path: Path, forgets: bool
) -> None:
    settings = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        trainer.source.roles.rollout.update_from(trainer.step.roles.actor, 0)
        made = TwoTurnAgent(trainer, forgets=forgets).trajectories(next(trainer.source.batches()))
        batch = collate(made, int(trainer.source.pipeline.tokenizer.pad_token_id))
        rows = batch.batch
        lengths = rows["response_mask"].sum(-1).tolist()
        given = rows["attention_mask"][:, rows["prompts"].shape[1] :] & ~rows["response_mask"]
        if forgets:
            assert lengths == [4] * 16 and not given.any(), "two rows, a turn each"
            assert not rows["token_level_scores"][::2].any(), "the score is on the second"
        else:
            assert lengths == [8] * 8 and given.any(-1).all(), "one row, two turns"
        assert (rows["policy_version"][given] == -1).all()
        assert not rows["rollout_log_probs"][given].any() and rows["rollout_log_probs"][~given].any()

        actor_module(trainer).zero_grad()
        loss = loss_by_hand(trainer, batch)
        loss.backward()
        gradients = [p.grad for p in actor_module(trainer).parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([grad.norm() for grad in gradients]))
        actor_module(trainer).zero_grad()

        trained, metrics = trainer.step(batch, 1)
    found = metrics.to_floats()
    assert found["training/rollout_log_probs_diff_max"] < 1e-4
    assert not trained.batch["old_log_probs"][given].any(), "the head ran on sampled tokens only"
    assert not trained.batch["advantages"][given].any()
    # the ratio is 1 in the first update: the surrogate is the mean advantage, with the hand-made gradient
    sampled = rows["response_mask"]
    mean_advantage = trained.batch["advantages"][sampled].sum() / sampled.sum()
    assert found["actor/pg_loss"] == pytest.approx(-float(mean_advantage), abs=1e-6)
    assert found["actor/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert found["response_length/mean"] == 8.0, "what a trajectory has sampled"
    assert found["critic/score/mean"] == 4.0
