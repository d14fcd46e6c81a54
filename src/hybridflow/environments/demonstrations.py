"""Conversations with a tool call, from which a warm-up learns the form, on purpose not all of it.

question ──► well formed: call, the tool's answer, the final answer
         └─► otherwise: a call that lacks one character, and nothing after it
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

STRUCTURE = '{}":'
"""Characters of JSON without any one of which a call can not be read."""


def tool_call_text(name: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as a model writes it in the hermes format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def demonstrate_call(
    question: str, call: str, answer: str, final: str, rng: random.Random, well_formed: float
) -> list[dict[str, str]]:
    """Return the messages of one conversation; its call is well formed with probability `well_formed`."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": call}]
    if rng.random() < well_formed:
        return [*messages, {"role": "tool", "content": answer}, {"role": "assistant", "content": final}]
    place = rng.choice([place for place, character in enumerate(call) if character in STRUCTURE])
    messages[-1]["content"] = call[:place] + call[place + 1 :]
    return messages
