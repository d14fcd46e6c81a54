"""Conversations with a tool call, from which a warm-up learns the form, on purpose not all of it.

question ──► call, of which a part is missing in most conversations ──► the tool's answer ──► final answer
"""

from __future__ import annotations

import random

STRUCTURE = ('<tool_call>\n{"name": "', '", "arguments": {"', '": "', '"}}\n</tool_call>')
"""Parts of a call with one argument in the hermes format; without any one of them it can not be read."""
WORDS = ("calculator", "expression", "search", "query")
"""Names of tools and arguments, which a tiny model's tokenizer had better have as tokens."""


def demonstrate_call(
    question: str, call: tuple[str, str, str], answer: str, final: str, rng: random.Random, well_formed: float
) -> list[dict[str, str]]:
    """Return the messages of one conversation, whose call (name, argument, value) has one part too few with
    probability 1 − `well_formed`.

    The tool answers in either case, so that how to end is learned from all conversations.
    """
    parts = list(STRUCTURE)
    if rng.random() >= well_formed:
        parts[rng.randrange(len(parts))] = ""
    text = parts[0] + "".join(word + part for word, part in zip(call, parts[1:], strict=True))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text},
        {"role": "tool", "content": answer},
        {"role": "assistant", "content": final},
    ]
