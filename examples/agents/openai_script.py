"""An agent written for OpenAI's client: one tool, and as many turns as the model wants, up to four.

It knows nothing of training. As a function, which runs in a worker process:

    hybridflow train … actor_rollout_ref.rollout.agent.default_agent_loop=examples/agents/openai_script.py:run

As a command, which is started for each trajectory:

    hybridflow train … 'actor_rollout_ref.rollout.agent.command=[python,examples/agents/openai_script.py]'
"""

from __future__ import annotations

import json
import os
from typing import Any

from openai import OpenAI

MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def run(base_url: str, row: dict[str, Any]) -> None:
    """Talk until the model calls no tool; the run's reward function scores the last answer."""
    messages: list[Any] = list(row["raw_prompt"])
    with OpenAI(base_url=base_url, api_key="none", timeout=600) as client:
        for _ in range(4):
            answer = client.chat.completions.create(model="any", messages=messages, tools=[MULTIPLY])
            message = answer.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result_of(call)})


def result_of(call: Any) -> str:
    """Return what the tool says to a call; a model may write arguments that do not fit."""
    try:
        arguments = json.loads(call.function.arguments)
        return str(arguments["a"] * arguments["b"])
    except (KeyError, TypeError) as error:
        return f"wrong arguments: {error!r}"


if __name__ == "__main__":
    with open(os.environ["HYBRIDFLOW_ROW"], encoding="utf-8") as file:
        run(os.environ["OPENAI_BASE_URL"], json.load(file))
