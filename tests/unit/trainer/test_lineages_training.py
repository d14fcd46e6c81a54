"""Agents with a sub-agent, a summary in place of a history, and an edited history, trained: several
rows are one sample of their group, whose advantage is that of a slow reference, and exact mode holds.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config

AGENTS = """
from dataclasses import replace

from hybridflow.agent.episode import AgentResult
from hybridflow.protocol.prompt import Prompt


class Several:
    "Plays each sample of a group in another way."

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def run(self, episode, policy):
        sampling = replace(episode.sampling, max_tokens=4, ignore_eos=True)

        async def ask(ids):
            return list((await policy.generate(Prompt(tuple(ids)), sampling=sampling)).token_ids)

        start = list(episode.prompt.token_ids)
        first = await ask(start)
        if episode.sample == 0:
            await ask([*start, *first, *self.ids(" = 2 .")])
        elif episode.sample == 1:  # the answer of a sub-agent, in the way of a tool's
            helper = await ask([*self.ids("help"), *first])
            await ask([*self.ids("check"), *helper])
            await ask([*start, *first, *self.ids("helper "), *helper])
        elif episode.sample == 2:  # a summary, which is sampled and learned from, and a new beginning
            summary = await ask([*start, *first, *self.ids("sum up")])
            await ask([*start, *self.ids("so far "), *summary])
        else:  # an answer without its first token
            await ask([*start, *first[1:], *self.ids("again")])
        digits = sum(self.tokenizer.decode([token]).isdigit() for token in first)
        return AgentResult(reward=episode.sample % 3 + digits / 7, metrics={"digits": digits})
"""
ROWS = (1, 3, 2, 2)
"""Rows of each sample of a group: what begins with all tokens of a row goes on with it."""
CALLS = (2, 4, 3, 2)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_several_rows_are_one_sample(model: Path, tmp_path: Path, mode: str) -> None:
    (tmp_path / "agents.py").write_text(AGENTS)
    keys = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.exact=true",
        "actor_rollout_ref.rollout.max_model_len=120",
        f"actor_rollout_ref.rollout.agent.default_agent_loop='{tmp_path / 'agents.py'}:Several'",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        f"actor_rollout_ref.actor.loss_agg_mode={mode}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    )
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        made = trainer.source.next(1)
        trained, metrics = trainer.step(made.rows, 1)
    assert made.metrics.to_floats()["agent/num_rows/mean"] == sum(ROWS) / 4
    found = metrics.to_floats()
    assert found["training/rollout_log_probs_diff_max"] == 0.0

    batch = trained.batch
    mask = batch["response_mask"]
    rows: dict[int, list[int]] = defaultdict(list)
    for row, trajectory in enumerate(batch["trajectory_id"].tolist()):
        rows[trajectory].append(row)
    assert [len(of) for of in rows.values()] == list(ROWS) * 4
    assert [int(mask[of].sum()) for of in rows.values()] == [4 * calls for calls in CALLS] * 4

    scores = batch["token_level_scores"].double()
    rewards = torch.stack([scores[of].sum() for of in rows.values()]).view(4, 4)
    wanted = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-6)
    tokens = torch.tensor(CALLS, dtype=torch.float64).repeat(4, 1)
    for advantage, of in zip(wanted.flatten(), rows.values()):
        for row in of:
            assert torch.allclose(batch["advantages"][row][mask[row]].double(), advantage, atol=1e-5)
            assert not batch["advantages"][row][~mask[row]].any()
    # the ratio is 1 in the first update, so that the loss is a mean of advantages
    loss = -(wanted * tokens).sum() / tokens.sum()
    if mode == "seq-mean-token-mean":
        loss = -wanted.mean()  # rows of a trajectory share its weight
    assert found["actor/pg_loss"] == pytest.approx(float(loss), abs=1e-5)
    assert found["actor/grad_norm"] > 0
