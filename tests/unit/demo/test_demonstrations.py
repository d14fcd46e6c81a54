"""Demonstrations of the tiny environments: right in form in part, learnable by the tokenizer, repeatable."""

from __future__ import annotations

import pytest

from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.sft import encode_conversation
from hybridflow.demo.demonstrations import Demonstrations
from hybridflow.models.tiny import create_tiny_tool_tokenizer
from hybridflow.tools.parsers import TOOL_PARSERS, ToolCall


@pytest.mark.parametrize("environment", ["calculator", "search"])
def test_a_share_of_the_calls_can_be_read(environment: str) -> None:
    task = Demonstrations(seed=1, environment=environment, well_formed=0.25)
    rows = task.rows("train", 400)
    calls = 0
    for row in rows:
        parser = TOOL_PARSERS["hermes"]()
        found = [*parser.feed(row["messages"][1]["content"]), *parser.end()]
        calls += any(isinstance(each, ToolCall) for each in found)
    assert 70 <= calls <= 130
    assert rows[:10] == task.rows("train", 10) != task.rows("validation", 10)


@pytest.mark.parametrize("environment", ["calculator", "guess", "search"])
def test_only_the_assistants_tokens_are_learned(environment: str) -> None:
    tokenizer = create_tiny_tool_tokenizer()
    (row,) = Demonstrations(seed=0, environment=environment, well_formed=1.0).rows("train", 1)
    ids, mask = encode_conversation(ChatTemplate(tokenizer), row["messages"])
    assert tokenizer.unk_token_id not in ids
    learned = tokenizer.decode([token for token, keep in zip(ids, mask, strict=True) if keep])
    said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    assert learned == "".join(f"{text}<|im_end|>" for text in said)
