"""A run whose rows are played by an agent loop in verl's form, with tokens that the loop leaves out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_trainer import build, ppo_config

from hybridflow.errors import ConfigError
from hybridflow.observability.report import collect, write_report
from hybridflow.observability.trackers.jsonl import read_metrics

LOOP = """
from hybridflow.agent.agent_loop import AgentLoopBase, AgentLoopOutput

class TwoAnswers(AgentLoopBase):
    def __init__(self, *args, hint, **kwargs):
        super().__init__(*args, **kwargs)
        self.hint = hint

    async def run(self, sampling_params, raw_prompt, extra_info, **kwargs):
        ids = await self.apply_chat_template(raw_prompt)
        prompt, mask = list(ids), []
        for _ in range(2):
            await self.server_manager.generate("0", prompt_ids=ids, sampling_params=sampling_params)
            answer = await self.server_manager.generate(
                request_id="0", prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 4}
            )
            ids = ids + answer + self.hint
            mask += [0] + [1] * (len(answer) - 1) + [0] * len(self.hint)
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt) :], response_mask=mask, num_turns=4, metrics={},
            extra_fields={"messages": [*raw_prompt, {"role": "assistant", "content": "done"}]},
        )
"""


def keys(folder: Path) -> list[str]:
    (folder / "loop.py").write_text(LOOP)
    entry = {"name": "two_answers", "_target_": f"{folder / 'loop.py'}:TwoAnswers", "hint": [40, 41]}
    (folder / "loops.yaml").write_text(json.dumps([entry]))
    agent = "actor_rollout_ref.rollout.agent"
    return [
        f"{agent}.agent_loop_config_path='{folder / 'loops.yaml'}'",
        f"{agent}.default_agent_loop=two_answers",
        "actor_rollout_ref.rollout.max_model_len=64",
    ]


def test_a_run_learns_from_what_the_loop_says_exact_to_the_bit(model: Path, tmp_path: Path) -> None:
    exact = "actor_rollout_ref.rollout.exact=true"
    with build(ppo_config(model, tmp_path / "run", *keys(tmp_path), exact)) as trainer:
        trainer.fit()
    steps = [
        step for step in read_metrics(tmp_path / "run" / "metrics.jsonl").values() if "actor/pg_loss" in step
    ]
    assert len(steps) == 2
    assert all(step["training/rollout_log_probs_diff_max"] == 0.0 for step in steps)
    assert all(step["agent/num_messages"] == 4.0 and step["agent/num_rows/mean"] == 1.0 for step in steps)
    (first, *_) = collect(tmp_path / "run")["details"]["samples/1"]
    assert first["messages"][-1] == {"role": "assistant", "content": "done", "calls": []}
    mask = first["tokens"]["response_mask"]
    assert 2 <= sum(mask) <= 6 and not all(mask), "three tokens of each answer at most, and none of the hint"
    spans = collect(tmp_path / "run")["timeline"][0]["spans"]
    lanes = {lane for lane, *_ in spans}
    own = [name for lane, name, *_ in spans if lane == f"trajectory {first['trajectory_id']}"]
    assert {"driver", "devices"} <= lanes
    assert own.count("generate") >= 2 and own[-1] == "reward", "the loop asks the model more than once"
    assert "two_answers" in write_report(tmp_path / "run").read_text(encoding="utf-8")


def test_a_name_that_there_is_not_is_refused_before_anything_is_built(model: Path, tmp_path: Path) -> None:
    wrong = [*keys(tmp_path), "actor_rollout_ref.rollout.agent.default_agent_loop=two_answer"]
    config = ppo_config(model, tmp_path / "run", *wrong)
    with (
        pytest.raises(ConfigError, match=r"there is no agent 'two_answer'; wanted .*two_answers"),
        build(config),
    ):
        raise AssertionError("not refused")
