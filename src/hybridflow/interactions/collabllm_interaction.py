"""CollabLLM's simulated user: a model that has a problem in mind, and reveals it bit by bit.

Source: Wu et al. 2025, arXiv 2502.00640.

interaction:
  - name: collabllm
    class_name: hybridflow.interactions.collabllm_interaction.CollabLLMInteraction
    config: {user_model: gpt-4o-mini, max_tokens: 512, temperature: 1.0}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.errors import ConfigError
from hybridflow.interactions.base import BaseInteraction
from hybridflow.rewards.functions.collabllm import as_text
from hybridflow.tools.http_post import ask_model

END = "[[TERMINATE CHAT]]"
INSTRUCTION = """\
You play a person who talks with an AI assistant. You want help with: {task_desc}.

What you have in mind, and what the assistant does not see:
<intent>
{single_turn_prompt}
</intent>

The conversation so far:
<conversation>
{conversation}
</conversation>

Write your next message, and nothing else. Speak as a person does who has little time: briefly, one thing at
a time, and not always precisely. Tell of what you have in mind only as far as you are asked or as it helps.
Never solve the problem yourself, and never speak as the assistant. When you have what you wanted, or when
nothing more is to be had, write {end} alone."""


class CollabLLMInteraction(BaseInteraction):
    """A user with the row's `single_turn_prompt` in mind, who wants help with its `task_desc`.

    The config has the `user_model`'s name, the `base_url` of its OpenAI-compatible endpoint (else
    OPENAI_BASE_URL's, with OPENAI_API_KEY), and what each request is to have, such as `max_tokens` and
    `temperature`. With `replies`, a list of texts, the user says these in turn and then leaves: for trying
    things out without a second model.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self.replies: Sequence[str] = config.get("replies") or ()
        self._said: dict[str, int] = {}
        own = ("user_model", "replies", "name", "num_retries", "enable_log")
        self.request = {key: value for key, value in config.items() if key not in own}
        if not self.replies and not config.get("user_model"):
            raise ConfigError("CollabLLMInteraction: set user_model in its config, or replies")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation."""
        instance_id = await super().start_interaction(instance_id)
        self._said[instance_id] = 0
        return instance_id

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget a conversation."""
        del self._said[instance_id]

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Return what the user says next, and whether that is the end; there is no reward."""
        if self.replies:
            said = self._said[instance_id]
            self._said[instance_id] += 1
            reply = [*self.replies[said:], END][0]
        else:
            content = INSTRUCTION.format(
                task_desc=kwargs.get("task_desc", "a task of mine"),
                single_turn_prompt=kwargs["single_turn_prompt"],
                conversation=as_text(messages),
                end=END,
            )
            asked = [{"role": "user", "content": content}]
            reply = await ask_model(asked, model=self.config["user_model"], **self.request)
        return END in reply, reply.replace(END, "").strip(), 0.0, {}
