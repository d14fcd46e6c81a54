"""verl's agent loops as agents: written as its documents show, with rows of the sampled tokens alone."""

from __future__ import annotations

import asyncio
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoken_engine import LIMITS, FakeSession, client_of, episode

from hybridflow.agent.agent_loop import (
    AgentLoopAgent,
    AgentLoopBase,
    AgentLoopOutput,
    AsyncLLMServerManager,
    learned_calls,
    sampling_of,
)
from hybridflow.agent.build import load_agent_loop
from hybridflow.agent.episode import Policy, TrajectoryFailed
from hybridflow.agent.runner import Limit, Runner
from hybridflow.config import PPOConfig
from hybridflow.config.agent import AgentConfig, RetriesConfig
from hybridflow.config.convert import convert
from hybridflow.episodes.agents import Agents
from hybridflow.errors import ConfigError
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.processes.local import LocalHosts
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import PolicyCall, Trajectory, rows_of
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams

END = 3
TOKENIZER = create_tiny_tokenizer()
QUESTION = [{"role": "user", "content": "1 + 1"}]

DOCUMENTED = """
import asyncio
from typing import Any
from uuid import uuid4

from hybridflow.agent.agent_loop import AgentLoopBase, AgentLoopOutput, register


@register("single_turn_of_mine")
class SingleTurn(AgentLoopBase):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prompt_length = self.config.actor_rollout_ref.rollout.prompt_length
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages = list(kwargs["raw_prompt"])
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True),
        )
        output = await self.server_manager.generate(
            request_id=uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=None
        )
        mask = [1] * len(output.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids, response_ids=output.token_ids[: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=output.log_probs[: self.response_length] if output.log_probs else None,
            num_turns=2, metrics={}, multi_modal_data={},
        )


class ToolLoop(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.times_made = getattr(cls, "times_made", 0) + 1
        cls.tool_answer = kwargs["tool_answer"]
        cls.max_turns = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns

    async def run(self, sampling_params, raw_prompt, extra_info, **kwargs):
        prompt_ids = await self.apply_chat_template(raw_prompt)
        response_mask = []
        request_id = uuid4().hex
        for turn in range(self.max_turns):
            response_ids = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            prompt_ids += response_ids
            response_mask += [1] * len(response_ids)
            if turn + 1 < self.max_turns:
                prompt_ids += self.tool_answer
                response_mask += [0] * len(self.tool_answer)
        return AgentLoopOutput(
            prompt_ids=prompt_ids[: -len(response_mask)],
            response_ids=prompt_ids[-len(response_mask) :],
            response_mask=response_mask,
            num_turns=2 * self.max_turns,
            metrics={"tool_calls": 0.5, "num_preempted": -1},
            reward_score=float(extra_info["worth"]),
            extra_fields={"tool_rewards": [0.25], "found": 2, "note": "words"},
        )
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "loops.py"
    path.write_text(DOCUMENTED)
    return path


def config(**agent: Any) -> PPOConfig:
    rollout = {"agent": agent, "multi_turn": {"max_assistant_turns": 2}}
    data = {"max_prompt_length": 100, "max_response_length": 8}
    made: PPOConfig = convert(PPOConfig, {"data": data, "actor_rollout_ref": {"rollout": rollout}})
    return made


def three_and_the_end(request: GenerationRequest) -> list[int]:
    last = request.prompt_token_ids[-1]
    return [last + 1, last + 2, last + 3]


def played(agent: Any, *episodes: Any, script: Callable[..., Any] = three_and_the_end) -> list[Trajectory]:
    config = AgentConfig(retries=RetriesConfig(environment=0))
    runner = Runner(lambda _: agent, TOKENIZER, LIMITS, config, hosts=LocalHosts(), limit=Limit())
    told: dict[int, Trajectory] = {}

    async def work() -> None:
        with client_of(FakeSession(script, end=END)) as client:
            await runner.run(client, episodes, told.__setitem__)

    asyncio.run(work())
    return [told[place] for place in range(len(episodes))]


def test_a_loop_as_documented_trains_on_what_was_sampled(file: Path) -> None:
    agent = load_agent_loop(f"{file}:SingleTurn", config(), TOKENIZER)
    assert load_agent_loop("single_turn_of_mine", config(), TOKENIZER) is not None
    (found,) = played(agent, episode(raw_prompt=QUESTION))
    assert found.outcome.kind == "finished", found.outcome.detail
    ids = TOKENIZER.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    (row,) = found.lineages
    assert row.prompt.token_ids == tuple(ids)
    assert row.response_ids == [ids[-1] + 1, ids[-1] + 2, ids[-1] + 3, END] and all(row.sampled_mask)
    assert found.metrics["num_messages"] == 2 and found.reward is None


def test_a_loop_that_cuts_its_response_is_truncated_there(file: Path) -> None:
    agent = load_agent_loop(f"{file}:SingleTurn", config(), TOKENIZER)
    (found,) = played(agent, episode(raw_prompt=QUESTION), script=lambda request: range(10, 30))
    assert found.outcome.kind == "truncated"
    assert found.lineages[0].response_ids == list(range(10, 18))  # data.max_response_length


def test_a_loop_of_several_turns_from_a_yaml_file(file: Path, tmp_path: Path) -> None:
    yaml = tmp_path / "loops.yaml"
    yaml.write_text(
        textwrap.dedent(f"""
        - name: with_tool
          _target_: {file}:ToolLoop
          tool_answer: [40, 41]
        """)
    )
    agent = load_agent_loop("with_tool", config(agent_loop_config_path=str(yaml)), TOKENIZER)
    rows = [episode(sample, raw_prompt=QUESTION, extra_info={"worth": sample}) for sample in range(3)]
    trajectories = played(agent, *rows)
    assert [found.reward for found in trajectories] == [0.0, 1.0, 2.0]
    for found in trajectories:
        (row,) = found.lineages
        sampled = [segment.sampled for segment in row.segments]
        assert sampled == [True, False, True] and row.segments[1].token_ids == (40, 41)
        assert found.metrics == {"num_messages": 4.0, "tool_calls": 0.5, "found": 2.0}
        info = found.extra["extra_info"]
        assert info["tool_rewards"] == [0.25] and info["note"] == "words" and info["num_turns"] == 4
        assert found.turns == 2
    assert agent._make.func.times_made == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (
            lambda ids, out: AgentLoopOutput(ids, [*out[:2], 99, out[3]], [1, 1, 1, 1]),
            "its token 2 \\(id 99\\)",
        ),
        (lambda ids, out: AgentLoopOutput(ids, [*out, 50], [1] * 5), "its token 4 \\(id 50\\)"),
        (lambda ids, out: AgentLoopOutput([*ids, 50], out, [1] * 4), "its token 0"),
        (lambda ids, out: AgentLoopOutput(ids, out, [1]), "give one for each token"),
        (lambda ids, out: AgentLoopOutput(ids, out, [0] * 4), "no token with mask 1"),
        (lambda ids, out: out, "wanted an AgentLoopOutput"),
    ],
)
def test_a_response_that_was_not_sampled_fails_the_trajectory(returned: Any, said: str) -> None:
    class Wrong(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            out = await self.server_manager.generate("a", prompt_ids=[5, 6], sampling_params=sampling_params)
            made: AgentLoopOutput = returned([5, 6], out)
            return made

    (found,) = played(AgentLoopAgent(Wrong, {}, config(), TOKENIZER), episode(raw_prompt=QUESTION))
    assert found.outcome.cause == "environment"
    assert re.search(said, found.outcome.detail), found.outcome.detail


def call(prompt: Sequence[int], *ids: int) -> PolicyCall:
    output = GenerationOutput(0, list(ids), [-float(each) for each in ids], "stop", [1] * len(ids))
    return PolicyCall(Prompt(tuple(prompt)), output)


def test_what_a_loop_masks_out_is_read_and_not_learned_from() -> None:
    first, second = call([1], 10, 11, 12), call([1, 10, 11, 12, 50], 13, 14)
    output = AgentLoopOutput([1], [10, 11, 12, 50, 13, 14], [1, 0, 1, 0, 0, 1])
    (row,) = rows_of(learned_calls([first, second], output))
    assert row.response_ids == [10, 11, 12, 50, 13, 14]
    assert row.sampled_mask == [True, False, True, False, False, True]
    assert [segment.log_probs for segment in row.segments if segment.sampled] == [(-10,), (-12,), (-14,)]
    whole = AgentLoopOutput([1], [10, 11, 12, 50, 13, 14], [0, 0, 0, 0, 1, 1])
    learned = learned_calls([first, second], whole)
    assert [each.accepted for each in learned] == [False, True] and learned[1] is second


def test_an_answer_that_the_loop_drew_again_is_not_learned_from() -> None:
    thrown, kept = call([1], 10, 11), call([1], 10, 12)
    learned = learned_calls([kept, thrown], AgentLoopOutput([1], [10, 12], [1, 1]))
    assert [each.accepted for each in learned] == [True, False] and learned[0] is kept
    learned = learned_calls([thrown, kept], AgentLoopOutput([1], [10, 12], [1, 1]))
    assert [each.accepted for each in learned] == [False, True]


TURNS = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=4), st.lists(st.integers(0, 9))),
    min_size=1,
    max_size=4,
)


@given(TURNS)
@settings(max_examples=60, deadline=None)
def test_the_learned_tokens_are_exactly_those_with_mask_1(turns: Any) -> None:
    ids = [1]
    mask: list[int] = []
    calls = []
    for answer, given_ids in turns:
        calls.append(call(ids, *(token for token, _ in answer)))
        ids = [*ids, *(token for token, _ in answer), *given_ids]
        mask += [int(learned) for _, learned in answer] + [0] * len(given_ids)
    output = AgentLoopOutput([1], ids[1:], mask)
    if not any(mask):
        with pytest.raises(TrajectoryFailed, match="no token with mask 1"):
            learned_calls(calls, output)
        return
    (row,) = rows_of(learned_calls(calls, output))
    whole = [*row.prompt.token_ids, *row.response_ids]
    learned = [False] * len(row.prompt) + row.sampled_mask
    assert whole == ids[: len(whole)]
    assert learned == [bool(each) for each in [0, *mask]][: len(whole)] and not any(mask[len(whole) - 1 :])


def test_sampling_of_a_call_is_the_run_s_with_its_changes() -> None:
    run = SamplingParams(max_tokens=64, temperature=0.7, min_tokens=20)
    changed = sampling_of({"temperature": 0.7, "max_new_tokens": 9, "stop": "x", "logprobs": True}, run)
    assert (changed.max_tokens, changed.min_tokens, changed.stop) == (9, 9, ("x",))
    assert sampling_of({"top_p": None}, run) == run
    with pytest.raises(TrajectoryFailed, match=r"temperature=1\.0, and the run samples and trains at 0\.7"):
        sampling_of({"temperature": 1.0}, run)
    with pytest.raises(TrajectoryFailed, match="sets best_of=2"):
        sampling_of({"best_of": 2}, run)
    assert sampling_of({"temperature": 0}, SamplingParams(4, greedy=True)).greedy


def test_an_answer_is_a_list_and_an_object() -> None:
    async def work() -> None:
        with client_of(FakeSession(three_and_the_end, end=END)) as client:
            manager = AsyncLLMServerManager(Policy(client, episode(), LIMITS, lambda: 0))
            answer = await manager.generate("a", prompt_ids=[5, 6], sampling_params={})
            assert [5, 6, *answer] == [5, 6, 7, 8, 9, END] and answer.token_ids == answer
            assert len(answer.log_probs) == len(answer) == 4
            with pytest.raises(TrajectoryFailed, match="pictures"):
                await manager.generate("b", prompt_ids=[5], sampling_params={}, image_data=[object()])

    asyncio.run(work())


def test_an_agent_of_one_s_own_and_names_that_there_are_not(file: Path, tmp_path: Path) -> None:
    file.write_text(
        "class Mine:\n"
        "    def __init__(self, tokenizer, size): self.size = size\n"
        "    async def run(self, episode, policy): ...\n"
        "class Nothing:\n"
        "    def __init__(self, tokenizer, size): self.size = size\n"
    )
    mine: Any = load_agent_loop(f"{file}:Mine", config(options={"size": 3}), TOKENIZER)
    assert mine.size == 3
    with pytest.raises(ConfigError, match="is no class with `async def run"):
        load_agent_loop(f"{file}:Nothing", config(options={"size": 3}), TOKENIZER)
    with pytest.raises(ConfigError, match="there is no agent 'tol_agent'; wanted single_turn_agent"):
        load_agent_loop("tol_agent", config(), TOKENIZER)
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("- name: a\n")
    with pytest.raises(ConfigError, match=r"entry 0: .* wanted a _target_"):
        load_agent_loop("a", config(agent_loop_config_path=str(wrong)), TOKENIZER)


def test_a_path_in_a_row_is_refused_unless_the_keys_have_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    code = "class A:\n    async def run(self, episode, policy): ...\n    def __init__(self, tokenizer): ...\n"
    file.write_text(code + f"open({str(tmp_path / 'loaded')!r}, 'w')\n")
    agents = Agents(config(), TOKENIZER)
    with pytest.raises(TrajectoryFailed, match="data cannot choose code") as caught:
        agents._agent_of(episode(agent_name=f"{file}:A"))
    assert caught.value.cause == "data" and not (tmp_path / "loaded").exists()
    named = Agents(config(default_agent_loop=f"{file}:A"), TOKENIZER)
    assert type(named._agent_of(episode(agent_name=f"{file}:A"))).__name__ == "A"


def test_the_page_s_examples_run(tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "agents" / "agent_loops.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    turns = []
    for name in ("Careful", "TwoTries"):
        (block,) = [block for block in blocks if f"class {name}" in block]
        (tmp_path / f"{name}.py").write_text(block)
        agent = load_agent_loop(f"{tmp_path / name}.py:{name}", config(), TOKENIZER)
        (found,) = played(agent, episode(raw_prompt=QUESTION))
        assert found.outcome.kind == "finished" and len(found.lineages) == 1, found.outcome.detail
        turns.append(found.turns)
    assert turns == [1, 2]
