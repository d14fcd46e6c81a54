"""CollabLLM's forward sampling (Wu et al. 2025, arXiv 2502.00640): an answer is rewarded by where it leads.

first prompt ──► answer ──► several continuations with a simulated user ──► reward function
                   └── the only call that is learned from
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import Any

from hybridflow.agent.conversation import Conversation, Message, messages_of
from hybridflow.agent.episode import AgentResult, Episode, LengthReached, Policy, TrajectoryFailed
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.interactions.environment import load_interactions
from hybridflow.protocol.trajectory import FINISHED, TRUNCATED
from hybridflow.rollout.base import GenerationOutput

_THINKING = re.compile(r"<think>.*?</think>", re.DOTALL)


class CollabLLM:
    """The policy answers the row's prompt, and then continues with the user of its `interaction_kwargs`.

    Reward functions find the continuations as `extra_info["conversations"]`, lists of messages of which the
    first `extra_info["num_prompt_messages"]` are the row's own. There is none where a limit cut the answer,
    or where it says nothing.
    """

    reads_text_alone = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        interaction_config_path: str,
        num_repeat_rollouts: int = 3,
        max_user_turns: int = 2,
    ) -> None:
        """Each of `num_repeat_rollouts` continuations has at most `max_user_turns` turns of the user, and as
        many of the policy. ConfigError where there is no such file of interactions.
        """
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer)
        made = load_interactions(interaction_config_path)
        self._interactions = {name: make() for name, make in made.items()}
        self._num_repeats = num_repeat_rollouts
        self._max_user_turns = max_user_turns

    async def run(self, episode: Episode, policy: Policy) -> AgentResult:
        """Play one episode."""
        row = episode.row.row
        kwargs = dict((row.get("extra_info") or {}).get("interaction_kwargs") or {})
        name = kwargs.get("name", "collabllm")
        if name not in self._interactions:
            raise TrajectoryFailed(
                "data",
                f"extra_info.interaction_kwargs.name: got {name!r}, wanted {', '.join(self._interactions)}",
            )
        prompt = messages_of(row["raw_prompt"])
        conversation = Conversation(self._template)
        conversation.begin(prompt)
        output = await policy.generate(conversation.prompt)
        outcome = FINISHED
        if output.finish_reason == "length":
            outcome = TRUNCATED
        answer = self._message(output)
        conversations: list[list[Message]] = []
        if outcome is FINISHED and answer["content"]:
            user = self._interactions[name]
            try:
                async with asyncio.TaskGroup() as tasks:
                    futures = [
                        tasks.create_task(self._go_on(policy, prompt, output, user, kwargs))
                        for _ in range(self._num_repeats)
                    ]
            except ExceptionGroup as group:  # the others have been cancelled
                raise group.exceptions[0] from group
            conversations = [future.result() for future in futures]
        # the future says what the answer was worth, and is not learned from
        policy.calls[1:] = [replace(call, accepted=False) for call in policy.calls[1:]]
        facts = {"conversations": conversations, "num_prompt_messages": len(prompt)}
        shown = [*prompt, answer]
        if conversations:
            shown = conversations[0]
        return AgentResult(outcome=outcome, messages=shown, extra_info=facts)

    async def _go_on(
        self,
        policy: Policy,
        prompt: list[Message],
        output: GenerationOutput,
        user: Any,
        kwargs: dict[str, Any],
    ) -> list[Message]:
        """Return one continuation, up to where the user leaves or a limit ends it."""
        conversation = Conversation(self._template)
        conversation.begin(prompt)
        conversation.answer(output, self._message(output))
        instance = await user.start_interaction(None, **kwargs)
        try:
            for _ in range(self._max_user_turns):
                messages = [dict(message) for message in conversation.messages]
                done, said, _, _ = await user.generate_response(instance, messages, **kwargs)
                if done:
                    break
                conversation.add(said)
                output = await policy.generate(conversation.prompt)
                conversation.answer(output, self._message(output))
                if output.finish_reason == "length":
                    break
        except LengthReached:
            pass  # what was said until then is the continuation
        finally:
            await user.finalize_interaction(instance)
        return conversation.messages

    def _message(self, output: GenerationOutput) -> Message:
        """Return the part of an answer that the user reads, without the thinking."""
        text = str(self._tokenizer.decode(list(output.token_ids), skip_special_tokens=True))
        return {"role": "assistant", "content": _THINKING.sub("", text).strip()}
