"""A tokenizer whose chat template writes tool calls, and the endpoint of a model that has it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

from spoken_engine import LIMITS, episode

from hybridflow.agent.endpoint import Endpoint
from hybridflow.agent.episode import Policy
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.rollout.base import SamplingParams
from hybridflow.rollout.client import LLMClient
from hybridflow.rollout.server.model import ServedModel

TOKENIZER = create_tiny_tokenizer()
END = TOKENIZER.eos_token_id
TOKENIZER.chat_template = (
    "{% for tool in tools or [] %}T{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': "
    "c.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SAMPLING = SamplingParams(100, temperature=0.5)


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def text(token_ids: Sequence[int]) -> str:
    return str(TOKENIZER.decode(token_ids))


def endpoint() -> Endpoint:
    """An endpoint for agents, which is not open yet."""
    model = ServedModel("tiny", TOKENIZER, len(TOKENIZER), LIMITS.max_model_len, "hermes")
    return Endpoint(model, ChatTemplate(TOKENIZER))


async def nothing_is_left(server: Endpoint) -> None:
    """Assert that all tasks end but this one and the server's."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    if server._server is not None:
        left -= {server._server._serving}
    if left:
        _, left = await asyncio.wait(left, timeout=60)  # an answer's last lines may still be on their way
    assert not left, f"tasks are left behind: {left}"


def policy_of(client: LLMClient, sampling: SamplingParams = SAMPLING) -> Policy:
    """The policy of one trajectory."""
    numbers = itertools.count()
    return Policy(client, replace(episode(), sampling=sampling), LIMITS, lambda: next(numbers))
