"""Training an agent that was written for OpenAI's client: its turns are one row of what was sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.observability.trackers.jsonl import read_metrics

AGENT = """
from openai import AsyncOpenAI

async def run(base_url, row):
    async with AsyncOpenAI(base_url=base_url, api_key="none", timeout=600, max_retries=0) as client:
        messages = list(row["raw_prompt"])
        said = ""
        for _ in range(3):
            answer = await client.chat.completions.create(model="any", messages=messages, temperature=0.1)
            said += answer.choices[0].message.content
            messages += [answer.choices[0].message, {"role": "user", "content": "go on"}]
    return {"score": sum(map(ord, said)) / 100, "length": len(said)}
"""
EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"


def trained(folder: Path, agent: str, *overrides: str) -> list[dict[str, float]]:
    """Train for a few steps; give the metrics of each."""
    model = tiny_model(folder / "model")
    config = ppo_config(
        model,
        folder / "run",
        f"actor_rollout_ref.rollout.agent.default_agent_loop='{agent}'",
        "data.max_response_length=3",  # of a turn
        "actor_rollout_ref.rollout.exact=true",
        "actor_rollout_ref.rollout.max_model_len=200",
        "actor_rollout_ref.rollout.agent.num_workers=0",
        "algorithm.adv_estimator=grpo",
        "trainer.test_freq=-1",
        *overrides,
    )
    with build(config) as trainer:
        trainer.fit()
    return list(read_metrics(folder / "run" / "metrics.jsonl").values())


def test_an_agent_of_openais_client_trains_with_the_ids_that_were_sampled(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    steps = trained(tmp_path, f"{tmp_path / 'agent.py'}:run")
    assert len(steps) == 2
    for step in steps:
        assert step["training/rollout_log_probs_diff_max"] == 0.0
        assert step["agent/num_turns/mean"] == 3.0 and step["agent/num_rows/mean"] == 1.0
        assert step["agent/length"] <= 30
    assert all(step["actor/grad_norm"] > 0 for step in steps)


@pytest.mark.parametrize("name", ["openai_script", "langgraph_agent"])
def test_the_examples_train(tmp_path: Path, name: str) -> None:
    if name == "langgraph_agent":
        pytest.importorskip("langgraph.prebuilt")
    steps = trained(tmp_path, f"{EXAMPLES / name}.py:run", "data.max_prompt_length=80")
    assert [step["training/rollout_log_probs_diff_max"] for step in steps] == [0.0, 0.0]
