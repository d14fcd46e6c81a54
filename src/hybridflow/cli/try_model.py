"""`hybridflow try --model`: a model plays an environment, and each turn is shown as the model reads and
writes it, special tokens included. This part imports torch.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.episode import AgentResult, Episode, Policy, PolicyLimits
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.config.agent import AgentConfig, MultiTurnConfig
from hybridflow.config.data import DataConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.data.media import MediaReader
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer, load_tokenizer, text_of
from hybridflow.distributed.device import resolve_device
from hybridflow.models.files.build import build_policy, generation_end_tokens
from hybridflow.observability.progress import progress
from hybridflow.processes.local import LocalHosts
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, SamplingParams
from hybridflow.rollout.client import EngineReplica, LLMClient
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.tools.parsers import parser_of_template
from hybridflow.tools.toolset import Toolset

MAX_TURNS = 32
MAX_MODEL_LEN = 8192
"""Tokens of the whole conversation, where the model has as many positions."""


class ShownPolicy(Policy):
    """A policy whose calls are printed: what is new in the prompt, then what the model writes."""

    def __init__(self, tokenizer: Tokenizer, *args: Any) -> None:
        super().__init__(*args)
        self._tokenizer = tokenizer
        self._shown = 0

    async def generate(self, prompt: Prompt, *, sampling: SamplingParams | None = None) -> GenerationOutput:
        """Show a call and its answer."""
        print(self._text(prompt.token_ids[self._shown :]), end="", flush=True)
        output = await super().generate(prompt, sampling=sampling)
        print(f"{self._text(output.token_ids)}\n[{len(output.token_ids)} tokens, {output.finish_reason}]")
        self._shown = len(prompt) + len(output.token_ids)
        return output

    def _text(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def show_model(
    spec: str, options: Mapping[str, Any], seed: int, row: dict[str, Any], model: str, max_new_tokens: int
) -> None:
    """Run one trajectory with the model in the folder `model`, with draws by `seed`, and at most
    `max_new_tokens` tokens in a turn.

    Raises ConfigError for the environment's name or options, ModelError for a model that does not load, and
    TrajectoryFailed for what the environment raises.
    """
    environment = EnvironmentSpec.of(spec, options)
    tokenizer = load_tokenizer(model)
    policy = build_policy(model, device=resolve_device("auto")).requires_grad_(False)
    ends = generation_end_tokens(model)
    engine = NativeEngine(policy, eos_token_ids=ends, decode=partial(text_of, tokenizer), max_num_seqs=1)
    longest = min(policy.config.get_text_config().max_position_embeddings, MAX_MODEL_LEN)
    parts = ChatParts(
        tokenizer,
        ChatTemplate(tokenizer),
        parser_of_template(str(tokenizer.chat_template)) or "hermes",
        Toolset(),
        LocalHosts(),
        MultiTurnConfig(max_assistant_turns=MAX_TURNS),
        AgentConfig(),
        reader=MediaReader.of_model(tokenizer, DataConfig()),
    )
    episode = Episode(PromptRow([], row, 0), 0, 0, seed, seed, SamplingParams(max_new_tokens))
    with closing(EngineReplica(engine)) as replica:
        limits = PolicyLimits(
            longest, longest, request_deadline=AgentConfig().request_deadline, lost_replicas=0
        )

        async def play() -> AgentResult:
            client = LLMClient([replica])
            shown = ShownPolicy(tokenizer, client, episode, limits, itertools.count().__next__)
            return await ChatAgent(parts, environment).run(episode, shown)

        deadline = parts.agent.call_deadline
        words = f"watching the model play {spec}, whose calls may take {deadline:g} s (agent.call_deadline)"
        with progress.shown(), progress.phase(words):
            result = asyncio.run(play())
    turns = ", ".join(f"turn {call + 1}: {reward:g}" for call, reward in sorted(result.turn_rewards.items()))
    numbers = "".join(f", {name} {value:g}" for name, value in result.metrics.items())
    print(f"{result.outcome.kind}, reward {result.reward:g} ({turns}){numbers}")
