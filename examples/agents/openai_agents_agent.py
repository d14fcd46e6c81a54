"""An agent of the package openai-agents, which speaks OpenAI's responses, in a process of its own.

It needs openai 3 or later; in an environment of its own it stands in nobody's way:

    python -m venv agents-env && agents-env/bin/pip install openai-agents
    hybridflow train … \\
        'actor_rollout_ref.rollout.agent.command=[agents-env/bin/python,examples/agents/openai_agents_agent.py]'
"""

from __future__ import annotations

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def main() -> None:
    """Answer the question of the data row, and write the reward."""
    set_tracing_disabled(True)
    with open(os.environ["HYBRIDFLOW_ROW"], encoding="utf-8") as file:
        row = json.load(file)
    agent = Agent(name="calculator", model="any", tools=[multiply])
    result = Runner.run_sync(agent, row["raw_prompt"], max_turns=4)  # it finds the model by OPENAI_BASE_URL
    right = row["reward_model"]["ground_truth"] in str(result.final_output).split()
    with open(os.environ["HYBRIDFLOW_RESULT"], "w", encoding="utf-8") as file:
        json.dump({"score": float(right)}, file)


if __name__ == "__main__":
    main()
