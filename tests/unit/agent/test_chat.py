"""Conversations with environments and tools: what the model reads, what is trained, and how each one ends."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from spoken_engine import LIMITS, FakeSession, client_of, episode, says

from hybridflow.agent.build import INTERACTIONS
from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.collate import collate
from hybridflow.agent.conversation import Conversation
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.agent.runner import Limit, Runner
from hybridflow.agent.tool_parser import FunctionCall, ToolParser
from hybridflow.config.agent import AgentConfig, MultiTurnConfig, RetriesConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.errors import ConfigError
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.rollout.base import GenerationOutput
from hybridflow.tools.schemas import schema_with
from hybridflow.tools.toolset import Toolset

TOKENIZER = create_tiny_tokenizer()
END = TOKENIZER.eos_token_id
WORLD = '''
import asyncio, os, time
from hybridflow.environments import Environment, Step
from hybridflow.tools import tool

class Guess(Environment):
    def reset(self, row):
        self.number = 1 + self.seed % 9
        self.turns = 0
        return "1 to 9?"

    def step(self, text):
        self.turns += 1
        if text == "hang":
            time.sleep(10000)
        if text == "raise":
            raise ValueError("a mistake of the environment")
        if text == "die":
            os._exit(3)
        guess = int(text)
        if guess == self.number:
            return Step(reward=1.0, done=True, extra={"acc": 1})
        return Step("higher" if guess < self.number else "lower", reward=0.125)

    def score(self):
        return -0.25 * self.turns

class Shop(Environment):
    def reset(self, row):
        self.bought = []
        wish = row["extra_info"]["wish"]
        return [{"role": "system", "content": "a shop"}, {"role": "user", "content": wish}]

    @tool
    def buy(self, product: str, count: int = 1) -> str:
        """Buy something."""
        if product == "fire":
            raise ValueError("too hot")
        self.bought += [product] * count
        return f"you have {len(self.bought)}"

    @tool("look")
    def show_all(self):
        """Look at what was bought."""
        return self.bought, 0.5, {"looks": 1}

    def step(self, text):
        return Step(done=True, reward=len(self.bought))

class Loud(Environment):
    def step(self, text):
        return Step("y" * 10**7, reward=0.5)

    def reset(self, row):
        return "say it"

class Ids(Environment):
    def reset(self, row):
        return [5, 6, 7]

    def step(self, text):
        return Step([8, 9])

class Slow(Environment):
    async def reset(self, row):
        await asyncio.sleep(0.01)
        self.lock = asyncio.Lock()  # cannot travel
        return "go"

    async def step(self, text):
        async with self.lock:
            return Step(done=True, reward=2.0)
'''
TOOLS = '''
from hybridflow.tools import tool

@tool
def double(number: int) -> int:
    """Double a number."""
    return 2 * number
'''
Answer = Callable[[str], str]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    made = Hosts(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("world") / "world.py"
    file.write_text(WORLD)
    return file


@pytest.fixture(scope="module")
def shop(world: Path) -> str:
    return f"{world}:Shop"


@pytest.fixture(scope="module")
def doubling(tmp_path_factory: pytest.TempPathFactory) -> Toolset:
    """The tools of a run, which double a number."""
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    return Toolset.load(MultiTurnConfig(function_tool_path=str(file)))


def played(
    answer: Answer,
    *,
    environment: str | None = None,
    hosts: HostsLike,
    tools: Toolset | None = None,
    samples: int = 1,
    multi_turn: MultiTurnConfig | None = None,
    agent: AgentConfig | None = None,
    max_tokens: int = 64,
    max_model_len: int = 400,
    tokenizer: Any = TOKENIZER,
    parser: str = "hermes",
    **row: Any,
) -> list[Trajectory]:
    """Have a model that says `answer(prompt)` play; give the trajectories in the order of their samples."""
    multi_turn = multi_turn or MultiTurnConfig()
    config = agent or AgentConfig(retries=RetriesConfig(0, 0, 0))
    parts = ChatParts(
        tokenizer, ChatTemplate(tokenizer, {}), parser, tools or Toolset(), hosts, multi_turn, config
    )
    spec = EnvironmentSpec.of(environment, {}) if environment else None
    limits = replace(LIMITS, max_model_len=max_model_len)
    runner = Runner(lambda _: ChatAgent(parts, spec), tokenizer, limits, config, hosts=hosts, limit=Limit())
    told: dict[int, Trajectory] = {}
    episodes = [episode(number, max_tokens=max_tokens, **row) for number in range(samples)]

    async def work() -> None:
        with client_of(says(tokenizer, answer, END)) as client:
            await runner.run(client, episodes, told.__setitem__)

    asyncio.run(work())
    return [told[place] for place in range(samples)]


def text_of(trajectory: Trajectory, sampled: bool) -> list[str]:
    """The texts of the segments of a trajectory's only row."""
    (row,) = trajectory.lineages
    return [TOKENIZER.decode(each.token_ids) for each in row.segments if each.sampled == sampled]


def bisect(prompt: str) -> str:
    """Guess by what was said so far."""
    low, high = 1, 9
    for guess, answer in re.findall(
        r"assistant\n(\d)<\|im_end\|>\n<\|im_start\|>user\n(higher|lower)", prompt
    ):
        low, high = (int(guess) + 1, high) if answer == "higher" else (low, int(guess) - 1)
    return str((low + high) // 2)


@pytest.mark.parametrize("in_process", [False, True])
def test_an_environment_is_played_to_its_end(world: Path, hosts: Hosts, in_process: bool) -> None:
    used = LocalHosts() if in_process else hosts
    first, second = played(bisect, environment=f"{world}:Guess", hosts=used, samples=2)
    assert first.outcome.kind == "finished" and first.turns == second.turns
    # the seed of the group is 11, so the number is 3: 5, 2, 3
    assert text_of(first, sampled=True) == ["5<|im_end|>", "2<|im_end|>", "3<|im_end|>"]
    assert text_of(first, sampled=False) == [
        "\n<|im_start|>user\nlower<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\nhigher<|im_end|>\n<|im_start|>assistant\n",
    ]
    assert TOKENIZER.decode(first.lineages[0].prompt.token_ids).endswith(
        "1 to 9?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert first.turn_rewards == {0: 0.125, 1: 0.125, 2: 1.0}
    assert first.reward == pytest.approx(1.25 - 0.75) and first.metrics["environment/acc"] == 1
    assert [message["role"] for message in first.extra["extra_info"]["messages"]] == ["user", "assistant"] * 3


def test_the_whole_conversation_is_what_the_template_renders(world: Path, hosts: Hosts) -> None:
    (found,) = played(bisect, environment=f"{world}:Guess", hosts=hosts)
    (row,) = found.lineages
    messages = [dict(message) for message in found.extra["extra_info"]["messages"]]
    whole = TOKENIZER.apply_chat_template(messages, tokenize=False)
    ids = TOKENIZER(whole, add_special_tokens=False)["input_ids"]
    assert [*row.prompt.token_ids, *row.response_ids] == ids[:-1], "all but the line break at the end"


@pytest.mark.parametrize(
    "text, cause",
    [("raise", "environment"), ("hang", "deadline"), ("die", "infrastructure"), ("no number", "environment")],
)
def test_an_environment_that_fails_fails_its_trajectory_only(
    world: Path, hosts: Hosts, text: str, cause: str
) -> None:
    config = AgentConfig(call_deadline=1.0, retries=RetriesConfig(0, 0, 0))
    turns = {0: 0}

    def answer(prompt: str) -> str:
        turns[0] += 1
        return text if turns[0] == 1 else bisect(prompt)

    found = played(answer, environment=f"{world}:Guess", hosts=hosts, samples=3, agent=config)
    assert sorted(str(one.outcome.cause) for one in found) == sorted([cause, "None", "None"])
    (failed,) = [one for one in found if one.failed]
    assert failed.lineages == () and failed.reward is None


class Spelled:
    """The tokenizer, whose model writes some texts a letter at a time, as no tokenizer of it would."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        return {"input_ids": [self.inner.convert_tokens_to_ids(letter) for letter in text]}


@pytest.mark.parametrize(
    "observation", ["lower", "\n<information>5</information>\n", " = 7", "#### 4", " ", "\n", "é \ufffd"]
)
def test_sampled_ids_stay_where_tokenising_their_text_would_give_fewer(
    observation: str, hosts: Hosts, tmp_path: Path
) -> None:
    """The answer ends in letters that a tokenizer joins to one token, with what follows as well."""
    text = "user + 1 ="
    ids = Spelled(TOKENIZER)(text)["input_ids"]
    assert len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) < len(ids)
    (tmp_path / "says.py").write_text(
        "from hybridflow.environments import Environment, Step\n"
        f"class Says(Environment):\n    def reset(self, row): return 'go'\n"
        f"    def step(self, text): return Step({observation!r}, reward=1.0)\n"
    )
    asked: list[tuple[int, ...]] = []

    def script(request: Any) -> list[int]:
        if request.prompt_token_ids not in asked:
            asked.append(request.prompt_token_ids)
        return ids

    spec = EnvironmentSpec.of(f"{tmp_path}/says.py:Says", {})
    two = MultiTurnConfig(max_assistant_turns=2)
    parts = ChatParts(
        *(TOKENIZER, ChatTemplate(TOKENIZER, {}), "hermes", Toolset(), hosts, two),
        AgentConfig(retries=RetriesConfig(0, 0, 0)),
    )
    runner = Runner(
        lambda _: ChatAgent(parts, spec), TOKENIZER, LIMITS, parts.agent, hosts=hosts, limit=Limit()
    )
    told: dict[int, Trajectory] = {}

    async def work() -> None:
        with client_of(FakeSession(script, end=END)) as client:
            await runner.run(client, [episode()], told.__setitem__)

    asyncio.run(work())
    (row,) = told[0].lineages
    first = TOKENIZER.apply_chat_template([{"role": "user", "content": "go"}], add_generation_prompt=True)
    assert list(asked[0]) == list(row.prompt.token_ids) == list(getattr(first, "input_ids", first))
    sampled = [list(each.token_ids) for each in row.segments if each.sampled]
    given = [list(each.token_ids) for each in row.segments if not each.sampled]
    assert sampled == [[*ids, END]] * 2
    assert TOKENIZER.decode(given[0]) == TOKENIZER.decode(
        TOKENIZER(f"\n<|im_start|>user\n{observation}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    )
    assert list(asked[1]) == [*row.prompt.token_ids, *sampled[0], *given[0]], "the engine reads the row"
    batch = collate([told[0]], 0).batch
    mask = batch["response_mask"][0].tolist()
    assert mask == [True] * len(sampled[0]) + [False] * len(given[0]) + [True] * len(sampled[1])
    assert batch["responses"].shape == batch["rollout_log_probs"].shape == batch["response_mask"].shape
    assert batch["responses"][0].tolist() == [*sampled[0], *given[0], *sampled[1]]
    assert (batch["rollout_log_probs"][0] != 0).tolist() == mask


def call(name: str, **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def shopping(*turns: str) -> Answer:
    """Say these in their order."""
    return lambda prompt: turns[prompt.count("<|im_start|>assistant\n") - 1]


def test_methods_of_an_environment_are_tools(world: Path, hosts: Hosts) -> None:
    (found,) = played(
        shopping(call("buy", product="tea", count=2), call("buy", product="milk"), call("look"), "done"),
        environment=f"{world}:Shop",
        hosts=hosts,
        extra_info={"wish": "tea and milk"},
        max_tokens=200,
        max_model_len=1000,
    )
    assert found.reward == 3.5 and found.turns == 4, "the calls' rewards count"
    given = text_of(found, sampled=False)
    assert "you have 2" in given[0] and "you have 3" in given[1] and '["tea", "tea", "milk"]' in given[2]
    assert found.metrics["tools/tool_calls"] == 3 and found.metrics["tools/raised"] == 0
    assert found.metrics["environment/looks"] == 1
    assert found.extra["extra_info"]["tool_rewards"] == [0.0, 0.0, 0.5]


@pytest.mark.parametrize(
    "wrong, problem, told",
    [
        (call("sell", product="tea"), "unknown", "no tool"),
        (call("buy", count="many", product="tea"), "malformed", "do not fit"),
        (call("buy", product="fire"), "raised", "too hot"),
        ("<tool_call>\n{buy tea}\n</tool_call>", "malformed", "could not be read"),
        ("\n".join([call("buy", product="tea")] * 2), "too_many", "not made"),
    ],
)
def test_a_call_that_goes_wrong_is_told_to_the_model_and_counted(
    world: Path, hosts: Hosts, wrong: str, problem: str, told: str
) -> None:
    (found,) = played(
        shopping(wrong, "sorry"),
        environment=f"{world}:Shop",
        hosts=hosts,
        extra_info={"wish": "tea"},
        max_tokens=200,
        max_model_len=1000,
    )
    assert found.outcome.kind == "finished" and found.metrics[f"tools/{problem}"] == 1
    assert told in text_of(found, sampled=False)[0]


LOOK = call("look")
DRAFT = call("buy", product="fire")
QWEN = "<function=buy>\n<parameter=product>\ntea\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("turn", "bought", "told", "malformed"),
    [
        # what is written in another way is read where nothing is guessed
        ('<tool_call>{"name": "buy", "parameters": {"product": "tea"}}</tool_call>', ["tea"], [], 0),
        ('<tool_call>{"name": "buy", "arguments": "{\\"product\\": \\"tea\\"}"}</tool_call>', ["tea"], [], 0),
        (f"{call('buy', product='</tool_call>')} So.", ["</tool_call>"], [], 0),
        # the reason is told, and how to write it
        ('<tool_call>{"name": "buy", "args": {"product": "tea"}}</tool_call>', [], ["unknown key 'args'"], 1),
        ('<tool_call>{"name": "buy", "arguments": {"product": "tea"}', [], ["JSON is not closed"], 1),
        ('{"name": "buy"} </tool_call>!', [], ["'product' is a required property"], 1),
        ("<tool_call>buy tea</tool_call>", [], ["it has no JSON before 'b'", '<tool_call>{"name": NAME'], 1),
        # so it is beside calls that can be read
        (f"{call('buy', product='tea')} <tool_call>{{}}</tool_call>", ["tea"], ["it has no name"], 1),
        # another format is named
        (QWEN, [], ["in the format qwen3_coder, and calls are read in the format hermes"], 1),
        (f"<tool_call>\n{QWEN}\n</tool_call>", [], ["in the format qwen3_coder"], 1),
        ('[TOOL_CALLS] [{"name": "buy", "arguments": {"product": "tea"}}]', [], ["format mistral"], 1),
        ('{"name": "buy", "parameters": {"product": "tea"}}', [], ["format llama3_json"], 1),
        # what is thought is not done
        (f"<think>{DRAFT}? No.</think>{call('buy', product='tea')}", ["tea"], [], 0),
        (f"<think>A <tool_call> then.</think>{call('buy', product='tea')}", ["tea"], [], 0),
        (f"{DRAFT}? No.</think>{call('buy', product='tea')}", ["tea"], [], 0),
        (f"<think>{DRAFT}", [], ["within thinking that has no end"], 1),
    ],
)
def test_what_a_turn_calls_and_what_the_model_is_told(
    shop: str, hosts: Hosts, turn: str, bought: list[str], told: list[str], malformed: int
) -> None:
    (found,) = played(
        shopping(turn, LOOK, "done"),
        environment=shop,
        hosts=hosts,
        multi_turn=MultiTurnConfig(max_parallel_calls=3, max_tool_response_length=1000),
        extra_info={"wish": "tea"},
        max_tokens=400,
        max_model_len=2000,
    )
    assert found.outcome.kind == "finished" and found.turns == 3
    messages = found.extra["extra_info"]["messages"]
    asked = next(place for place, each in enumerate(messages) if each["role"] == "assistant")
    last = [each for each in messages if each["role"] == "tool"][-1]
    assert json.loads(last["content"]) == bought
    answers = "\n".join(each["content"] for each in messages[asked + 1 :] if each["role"] == "tool")
    assert all(words in answers for words in told)
    assert found.metrics["tools/malformed"] == malformed and found.metrics["tools/raised"] == 0
    if malformed and "required" not in str(told):
        assert "could not be read" in answers
        ids = [each["tool_call_id"] for each in messages[asked + 1 : asked + 3] if each["role"] == "tool"]
        assert len(set(ids)) == len(ids)


def test_another_format_is_warned_of_once_a_run(
    shop: str, hosts: Hosts, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [QWEN, QWEN, '[TOOL_CALLS] [{"name": "look", "arguments": {}}]', "done"]
    found = played(
        shopping(*turns),
        environment=shop,
        hosts=hosts,
        samples=3,
        extra_info={"wish": "tea"},
        max_tokens=200,
        max_model_len=2000,
    )
    assert [each.metrics["tools/malformed"] for each in found] == [3.0] * 3
    for name in ("qwen3_coder", "mistral"):
        assert caplog.text.count(f"writes tool calls in the format {name}") == 1
        assert f"multi_turn.format={name}" in caplog.text


def test_a_prompt_that_ends_in_thinking(doubling: Toolset, hosts: Hosts) -> None:
    """A call before `</think>` is a draft, though no `<think>` stands in the response."""
    prompt = "<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    asked = {"prompt": TOKENIZER(prompt)["input_ids"], "raw_prompt": prompt}
    draft = call("double", number=5)
    more: dict[str, Any] = {"max_tokens": 200, "max_model_len": 1000, **asked}
    answer = shopping(f"{draft}\n</think>\n{call('double', number=21)}", "42")
    (found,) = played(answer, tools=doubling, hosts=hosts, **more)
    assert found.metrics["tools/tool_calls"] == 1 and "42" in text_of(found, sampled=False)[0]
    (found,) = played(shopping(draft, "42"), tools=doubling, hosts=hosts, **more)
    assert found.metrics["tools/tool_calls"] == 0 and found.metrics["tools/malformed"] == 1
    assert "no end (</think>)" in text_of(found, sampled=False)[0]


def test_tags_that_are_special_tokens_are_found_and_others_are_left_out(
    doubling: Toolset, hosts: Hosts
) -> None:
    """Which tokens are special is the tokenizer's to say, not the format's."""
    tokenizer = create_tiny_tokenizer()
    tags = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<other>"]
    tokenizer.add_tokens(tags, special_tokens=True)
    assert tokenizer.decode(tokenizer("<tool_call>x<other>")["input_ids"], skip_special_tokens=True) == "x"
    turns = [
        f"So<other>: {call('double', number=21)}",
        '[TOOL_CALLS] [{"name": "double", "arguments": {"number": 4}}]',
        "42",
    ]
    (found,) = played(
        shopping(*turns),
        tools=doubling,
        hosts=hosts,
        tokenizer=tokenizer,
        raw_prompt=[{"role": "user", "content": "twice 21?"}],
        max_tokens=200,
        max_model_len=1000,
    )
    assert found.metrics["tools/tool_calls"] == 1 and "format mistral" in text_of(found, sampled=False)[1]
    messages = found.extra["extra_info"]["messages"]
    assert messages[1]["content"] == "So:" and messages[1]["tool_calls"][0]["function"]["name"] == "double"
    parser = ToolParser.get_tool_parser("hermes", tokenizer)
    ids = [*tokenizer(turns[0])["input_ids"], END]
    text, calls = asyncio.run(parser.extract_tool_calls(ids))
    assert text == "So: " and calls == [FunctionCall("double", '{"number": 21}')]


def test_verls_parser_reads_texts_by_the_schemas() -> None:
    parser = ToolParser.get_tool_parser("qwen3_coder", TOKENIZER)
    ids = TOKENIZER("<function=buy><parameter=product>1.10</parameter></function>")["input_ids"]
    schema = schema_with("buy", "", product={"type": "string"})
    for tools in ([schema], [schema.model_dump()]):
        _, calls = asyncio.run(parser.extract_tool_calls(ids, tools))
        assert calls == [FunctionCall("buy", '{"product": "1.10"}')]


def test_the_end_of_a_turn_is_given_after_a_stop_text(world: Path, hosts: Hosts) -> None:
    """A text that ends a response leaves no end token, so that the template's own is what the model reads."""
    conversation = Conversation(ChatTemplate(TOKENIZER, {}))
    conversation.begin("1 to 9?")
    ids = list(TOKENIZER("5", add_special_tokens=False)["input_ids"])
    output = GenerationOutput(0, ids, [0.0], "stop", [0], stop_reason="5")
    conversation.answer(output, {"role": "assistant", "content": "5"})
    conversation.add("lower")
    assert "assistant\n5<|im_end|>\n<|im_start|>user\nlower" in TOKENIZER.decode(
        conversation.prompt.token_ids
    )


def test_a_templated_text_begins_a_conversation_with_tools(doubling: Toolset, hosts: Hosts) -> None:
    (found,) = played(
        shopping(call("double", number=21), "42"),
        tools=doubling,
        hosts=hosts,
        prompt=TOKENIZER("<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n")["input_ids"],
        raw_prompt="<|im_start|>user\n2?<|im_end|>\n<|im_start|>assistant\n",
        max_tokens=200,
        max_model_len=1000,
    )
    assert found.outcome.kind == "finished" and found.turns == 2


def test_token_ids_are_taken_as_they_are(world: Path, hosts: Hosts) -> None:
    limits = MultiTurnConfig(max_assistant_turns=3)
    (found,) = played(lambda _: "7", environment=f"{world}:Ids", hosts=hosts, multi_turn=limits)
    (row,) = found.lineages
    seven = TOKENIZER("7")["input_ids"][0]
    assert row.prompt.token_ids == (5, 6, 7)
    assert row.response_ids == [seven, END, 8, 9, seven, END, 8, 9, seven, END]
    assert found.outcome.kind == "truncated", "the limit of turns has ended it"


def test_an_environment_that_cannot_travel_works_too(world: Path, hosts: Hosts) -> None:
    found = played(lambda _: "go", environment=f"{world}:Slow", hosts=hosts, samples=3)
    assert [one.reward for one in found] == [2.0] * 3


def test_a_turn_that_is_cut_ends_the_trajectory(world: Path, hosts: Hosts) -> None:
    (found,) = played(lambda _: "5" * 30, environment=f"{world}:Guess", hosts=hosts, max_tokens=8)
    assert found.outcome.kind == "truncated" and found.turns == 1


def test_an_observation_that_can_never_fit_is_not_even_tokenised(world: Path, hosts: Hosts) -> None:
    (found,) = played(lambda _: "5", environment=f"{world}:Loud", hosts=hosts)
    assert found.outcome.kind == "truncated" and found.turns == 1 and found.reward == 0.5
    (first,) = played(
        lambda _: "5", environment=f"{world}:Shop", hosts=hosts, extra_info={"wish": "x" * 10**6}
    )
    assert first.outcome.cause == "data" and "1000006 characters" in first.outcome.detail


def test_a_conversation_without_room_ends_as_truncated(world: Path, hosts: Hosts) -> None:
    (found,) = played(lambda _: "9", environment=f"{world}:Guess", hosts=hosts, max_model_len=80)
    (row,) = found.lineages
    assert found.outcome.kind == "truncated" and found.turns > 1
    assert len(row.prompt) + len(row.response_ids) <= 80 and row.segments[-1].sampled


def test_tools_of_the_run_without_an_environment(doubling: Toolset, hosts: Hosts) -> None:
    question = [{"role": "user", "content": "twice 21?"}]
    (found,) = played(
        shopping(call("double", number=21), "#### 42"),
        tools=doubling,
        hosts=hosts,
        raw_prompt=question,
        max_tokens=200,
        max_model_len=1000,
    )
    assert found.reward is None, "the reward function of the run is to score it"
    assert found.extra["solution_str"] == "#### 42"
    assert "42" in text_of(found, sampled=False)[0] and found.metrics["tools/tool_calls"] == 1
    roles = [message["role"] for message in found.extra["extra_info"]["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]


def test_options_that_a_constructor_refuses_are_named_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="guess: got largest=0"):
        EnvironmentSpec.of("guess", {"largest": 0})
    (tmp_path / "users.yaml").write_text("interaction: []")
    with pytest.raises(ConfigError, match="has no list `interaction`"):
        EnvironmentSpec.of(INTERACTIONS, {"config_path": str(tmp_path / "users.yaml")})


@pytest.mark.parametrize("text, differs", [("5", 0.0), (" 5", 1.0)])
def test_tokens_are_compared_with_the_template_where_that_is_asked(
    world: Path, hosts: Hosts, caplog: pytest.LogCaptureFixture, text: str, differs: float
) -> None:
    """The text of a message is stripped, so that the template renders other tokens than were sampled."""
    strict = MultiTurnConfig(tokenization_sanity_check_mode="strict", max_assistant_turns=1)
    (found,) = played(
        lambda _: text, environment=f"{world}:Shop", hosts=hosts, multi_turn=strict, extra_info={"wish": "?"}
    )
    assert found.metrics["template_differences"] == differs
    assert ("not those of its chat template" in caplog.text) == bool(differs)
