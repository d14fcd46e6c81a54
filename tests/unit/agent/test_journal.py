"""Episodes that go on by their journal: at every line that may be the last one, and by every policy."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from spoken_engine import LIMITS, client_of, episode, says

from hybridflow.agent.chat import ChatAgent, ChatParts
from hybridflow.agent.collate import GROUPS_PER_STEP
from hybridflow.agent.hosted_environment import EnvironmentSpec
from hybridflow.agent.journal import NUMBER, GroupFile, Journal, settings_of
from hybridflow.agent.runner import Limit, Runner
from hybridflow.config import PPOConfig
from hybridflow.config.agent import AgentConfig, MultiTurnConfig, RetriesConfig
from hybridflow.data.chat_template import ChatTemplate
from hybridflow.errors import ConfigError
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts
from hybridflow.protocol.trajectory import Trajectory
from hybridflow.tools import tool
from hybridflow.tools.toolset import Toolset

TOKENIZER = create_tiny_tokenizer()
END = TOKENIZER.eos_token_id
ROOM = replace(LIMITS, max_model_len=4000, max_prompt_length=3000)
WORLD = '''
import json, os
from pathlib import Path
from hybridflow.environments import Environment, Step
from hybridflow.tools import tool

NOTES = Path(__file__).with_name("notes")

def note(call_id, what):
    with NOTES.open("a") as file:
        file.write(json.dumps([call_id, what]) + "\\n")
    fuse = Path(__file__).with_name("fuse")
    if fuse.exists() and fuse.read_text() == what:
        fuse.unlink()
        os._exit(3)

def noted(call_id):
    lines = [json.loads(line) for line in NOTES.read_text().splitlines()] if NOTES.exists() else []
    return next((what for each, what in lines if each == call_id), None)

class Stateless(Environment):
    def reset(self, row):
        self.sum = 0
        return "begin"

    def step(self, text, call_id=""):
        note(call_id, text)
        if text == "raise" and self.step_seed < 200:
            raise ValueError("as ordered")
        return self.after(text)

    def after(self, text):
        self.sum += len(text)
        return Step(f"{self.sum}", reward=len(text) / 8, done=self.sum >= 9, extra={"sum": self.sum})

    @tool
    def sell(self, what: str, call_id: str = "") -> str:
        """Sell it."""
        note(call_id, what)
        self.sum += 1
        return f"sold {what}, {self.sum}"

    def score(self):
        return float(self.sum)

class Repeatable(Stateless):
    after_loss = "repeat"

class Stateful(Stateless):
    after_loss = "ask"

    def state(self):
        return {"sum": self.sum}

    def restore(self, state):
        self.sum = state["sum"]

    def outcome(self, call_id):
        text = noted(call_id)
        if text is None:
            return None
        if ".step." in call_id:
            return self.after(text)
        self.sum += 1
        return f"sold {text}, {self.sum}"

class Strict(Stateful):
    after_loss = "fail"

class Odd(Stateful):
    def step(self, text, call_id=""):
        return Step("odd", done=True, extra={"what": self})

def bought(call_id):
    what = noted(call_id)
    return None if what is None else f"bought {what}"

@tool(after_loss="ask", outcome=bought)
def buy(what: str, call_id: str) -> str:
    """Buy it."""
    note(call_id, what)
    return f"bought {what}"

@tool(after_loss="fail")
def pay(what: str, call_id: str) -> str:
    """Pay for it."""
    note(call_id, what)
    return f"paid {what}"

@tool
def look(what: str) -> str:
    """Look at it."""
    note("a look", what)
    return f"seen {what}"
'''


def call(name: str, what: str) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": {"what": what}}) + "\n</tool_call>"


TALK = ("abc", call("buy", "tea"), call("sell", "milk"), "defghi")


@dataclass
class House:
    """A run of two samples that is played again and again in one folder."""

    folder: Path
    world: str = "Stateful"
    talk: tuple[str, ...] = TALK
    hosts: HostsLike = field(default_factory=LocalHosts)
    retries: RetriesConfig = field(default_factory=lambda: RetriesConfig(0, 0, 0))
    keeps: bool = True
    prompts: list[str] = field(default_factory=list)
    """What the model was asked, in all processes."""
    survived: Counter[str] = field(default_factory=Counter)
    """Counts of the last process."""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = self.folder / "world.py"
        self.file.write_text(WORLD)

    def play(self, num_samples: int = 2) -> list[Trajectory]:
        """Play the episodes as a new process would."""
        journal = Journal(self.folder / "journal", 4) if self.keeps else None
        keys = MultiTurnConfig(function_tool_path=str(self.file))
        config = AgentConfig(retries=self.retries)
        parts = ChatParts(
            *(TOKENIZER, ChatTemplate(TOKENIZER, {}), "hermes", Toolset.load(keys), self.hosts, keys, config)
        )
        agent = ChatAgent(parts, EnvironmentSpec.of(f"{self.file}:{self.world}", {}))
        runner = Runner(
            *(lambda _: agent, TOKENIZER, ROOM, config),
            hosts=self.hosts,
            limit=Limit(),
            journal=journal,
        )
        told: dict[int, Trajectory] = {}
        group = GROUPS_PER_STEP + 2
        episodes = [episode(number, group=group, max_tokens=400) for number in range(num_samples)]

        def answer(prompt: str) -> str:
            self.prompts.append(prompt)
            return self.talk[prompt.count("<|im_start|>assistant\n") - 1]

        async def work() -> None:
            with client_of(says(TOKENIZER, answer, END)) as client:
                await runner.run(client, episodes, told.__setitem__)

        asyncio.run(work())
        self.survived = runner.survived
        return [told[place] for place in range(num_samples)]

    @property
    def notes(self) -> list[list[str]]:
        """Ids and words of the calls that were carried out, without the id of the run."""
        path = self.folder / "notes"
        lines = map(json.loads, path.read_text().splitlines() if path.exists() else ())
        return sorted([call_id.partition(".")[2], what] for call_id, what in lines)

    @property
    def journal(self) -> Path:
        """The file of the group."""
        return self.folder / "journal" / "1-2.jsonl"


def facts(trajectories: list[Trajectory]) -> list[Any]:
    return [
        (one.lineages, one.reward, one.turn_rewards, one.outcome.kind, one.extra["extra_info"]["messages"])
        for one in trajectories
    ]


@pytest.fixture
def dies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, bytes], None]]:
    """Return what lets a process write no more than some lines, and a piece of the next one."""
    real = GroupFile.append

    def set_limit(most: int, torn: bytes = b"") -> None:
        left = [most]

        def append(self: GroupFile, line: Mapping[str, Any]) -> None:
            left[0] -= 1
            if left[0] == -1 and torn:
                with self._path.open("ab") as file:
                    file.write(torn)
            if left[0] < 0:
                raise OSError("killed")
            real(self, line)

        monkeypatch.setattr(GroupFile, "append", append)

    yield set_limit


def test_an_undisturbed_episode_is_the_one_without_a_journal(tmp_path: Path) -> None:
    kept = House(tmp_path / "kept")
    plain = House(tmp_path / "plain", keeps=False)
    assert facts(kept.play()) == facts(plain.play())
    assert len(kept.notes) == 8 and kept.survived["continued"] == 0
    assert kept.notes[0] == ["1048578.0.0.1.0", "tea"], "run, group, sample, life, turn, call"
    assert Journal(tmp_path / "kept" / "journal", 4).oldest_version(2) == 0
    assert Journal(tmp_path / "kept" / "journal", 4).oldest_version(3) is None
    asked = len(kept.prompts)
    again = kept.play()
    assert facts(again) == facts(plain.play()), "an ended episode comes out of its journal as a whole"
    assert kept.survived["continued"] == 2 and len(kept.prompts) == asked and len(kept.notes) == 8


@pytest.mark.parametrize("torn", [b"", b'{"sample": 0, "li'])
def test_killed_at_any_line(tmp_path: Path, dies: Callable[..., None], torn: bytes) -> None:
    whole = House(tmp_path / "whole")
    wanted = facts(whole.play(1))
    lines = whole.journal.read_bytes().count(b"\n")
    assert lines == 4 + 1 + 2 * 2 + 2 * 2 + 1, "generate, reset, step and tools with their begins, score"
    for most in range(lines):
        house = House(tmp_path / f"killed{most}")
        dies(most, torn)
        with pytest.raises(ExceptionGroup):
            house.play(1)
        asked = len(house.prompts)
        dies(lines)
        assert facts(house.play(1)) == wanted, f"killed after line {most}"
        assert house.notes == whole.notes and not house.survived["begun_anew"], f"killed after line {most}"
        before = house.journal.read_text().splitlines()[:most]
        kept = sum('"done": "generate' in line for line in before)
        assert len(house.prompts) - asked == 4 - kept, "no turn is sampled again that was kept"


def test_an_environment_without_a_state_begins_anew_unless_it_may_be_repeated(
    tmp_path: Path, dies: Callable[..., None]
) -> None:
    for world, anew in (("Stateless", 1), ("Repeatable", 0)):
        house = House(tmp_path / world, world)
        dies(6)
        with pytest.raises(ExceptionGroup):
            house.play(1)
        dies(99)
        wanted = facts(House(tmp_path / f"{world} whole", world).play(1))
        assert facts(house.play(1)) == wanted
        assert (house.survived["begun_anew"], house.survived["continued"]) == (anew, 1 - anew)
        lives = {note[0].split(".")[2] for note in house.notes}
        assert lives == ({"0", "1"} if anew else {"0"}), "a life that begins anew has ids of its own"


@pytest.mark.parametrize(
    ("name", "times", "answer", "unknown"),
    [
        ("buy", 1, "bought tea", 0),
        ("look", 2, "seen tea", 0),
        ("pay", 1, "It is not known whether pay was carried out", 1),
    ],
)
def test_a_call_whose_process_is_lost_is_asked_for_repeated_or_unknown(
    tmp_path: Path, name: str, times: int, answer: str, unknown: int
) -> None:
    hosts = Hosts(1)
    talk = ("abc", call(name, "tea"), "defghi")
    house = House(tmp_path, talk=talk, hosts=hosts, retries=RetriesConfig(1, 0, 0))
    (tmp_path / "fuse").write_text("tea")
    try:
        (found,) = house.play(1)
    finally:
        hosts.close()
    assert found.outcome.kind == "finished", "it went on in the same run"
    assert sum(what == "tea" for _, what in house.notes) == times
    (told,) = [each["content"] for each in found.extra["extra_info"]["messages"] if each["role"] == "tool"]
    assert told.startswith(answer)
    assert house.survived["calls_unknown"] == unknown and house.survived["continued"] == 1


def test_a_step_that_nobody_knows_of_fails_its_episode(tmp_path: Path) -> None:
    hosts = Hosts(1)
    house = House(tmp_path, "Strict", hosts=hosts, retries=RetriesConfig(1, 0, 0))
    (tmp_path / "fuse").write_text("abc")
    try:
        (found,) = house.play(1)
    finally:
        hosts.close()
    assert found.outcome.cause == "environment" and house.survived["calls_unknown"] == 1
    assert re.search(r"not known whether step\(\) of .*Strict was carried out", found.outcome.detail)


def test_a_try_that_has_failed_is_not_tried_again_by_the_next_process(
    tmp_path: Path, dies: Callable[..., None]
) -> None:
    house = House(tmp_path / "a", talk=("raise", "abcdefghi"), retries=RetriesConfig(0, 1, 0))
    whole = House(tmp_path / "b", talk=house.talk, retries=house.retries)
    wanted = facts(whole.play(1))
    assert {note[0].split(".")[2] for note in whole.notes} == {"0", "1"}
    lines = whole.journal.read_text().splitlines()
    failed = next(number for number, line in enumerate(lines) if '"failed"' in line)
    dies(failed + 3)
    with pytest.raises(ExceptionGroup):
        house.play(1)
    dies(99)
    assert facts(house.play(1)) == wanted and house.notes == whole.notes


def test_what_json_cannot_write_ends_the_journal_of_its_episode_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = House(tmp_path, "Odd")
    (found,) = house.play(1)
    assert found.outcome.kind == "finished" and "which JSON cannot write" in caplog.text
    house.play(1)
    assert house.survived["continued"] == 0, "it is another life"


def test_another_prompt_or_seed_is_another_episode(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 4)
    first = journal.episode(GROUPS_PER_STEP, 0, (1, 2))

    async def number() -> float:
        return 1.0

    asyncio.run(first.once("score", (), NUMBER, number))
    assert Journal(tmp_path, 4).episode(GROUPS_PER_STEP, 0, (1, 2)).has_past
    assert not Journal(tmp_path, 4).episode(GROUPS_PER_STEP, 0, (1, 3)).has_past
    assert not Journal(tmp_path, 4).episode(GROUPS_PER_STEP, 1, (1, 2)).has_past


def test_files_go_with_the_checkpoint_that_has_their_rows(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 4)
    for index in range(8):
        step, place = divmod(index, 4)
        (tmp_path / f"{step + 1}-{place}.jsonl").touch()
    journal.committed({"admitted": 5, "groups": [{"index": 1, "rows": None}, {"index": 2, "rows": {}}]})
    assert sorted(path.stem for path in tmp_path.glob("*.jsonl")) == ["1-1", "2-1", "2-2", "2-3"]
    journal.settle({"model": 1}, anew=False)
    run = journal.run
    assert not list(tmp_path.glob("*.jsonl")), "nobody knows of which model they were"
    (tmp_path / "1-1.jsonl").touch()
    journal.settle({"model": 1}, anew=False)
    assert list(tmp_path.glob("*.jsonl")) and journal.run == run == Journal(tmp_path, 4).run
    journal.settle({"model": 2}, anew=False)
    assert not list(tmp_path.glob("*.jsonl")) and journal.run != run


def test_policies_of_tools_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got after_loss='never', wanted repeat, ask or fail"):
        tool(after_loss="never")  # type: ignore[call-overload]
    file = tmp_path / "tools.py"
    file.write_text(WORLD.replace('after_loss="ask", outcome=bought', 'after_loss="ask"'))
    with pytest.raises(ConfigError, match="buy: after_loss=ask wants an outcome"):
        Toolset.load(MultiTurnConfig(function_tool_path=str(file)))
    file.write_text(WORLD.replace("def outcome", "def other"))
    with pytest.raises(ConfigError, match="after_loss=ask wants an outcome"):
        EnvironmentSpec.of(f"{file}:Stateful", {})


@pytest.mark.parametrize("line", ["5", "[]", "{}", '{"sample":0,"life":0,"of":"x","done":"a"}', "{"])
def test_lines_of_another_form_end_what_is_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "1-0.jsonl"
    good = json.dumps({"sample": 0, "life": 0, "of": "x", "begun": "a", "with": "b"})
    path.write_text(f"{good}\n{line}\n{good}\n")
    file = GroupFile(path)
    assert file.lives[0, 0].begun == {"a": "b"}
    file.append({"sample": 0, "life": 0, "of": "x", "over": "z"})
    assert path.read_text() == f"{good}\n" + path.read_text().splitlines()[1] + "\n"


@pytest.mark.parametrize("text", ["", "{", "{}", "[1]", '{"run": "a"}', '{"run": "a", "models": 3}'])
def test_a_journal_that_says_nothing_of_its_run_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    (tmp_path / "a-b.jsonl").write_text("not ours")
    journal = Journal(tmp_path, 4)
    assert len(journal.run) == 12 and Journal(tmp_path, 4).run == journal.run
    assert (tmp_path / "a-b.jsonl").exists()


def test_other_keys_are_another_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = PPOConfig()
    longer = replace(config, trainer=replace(config.trainer, total_training_steps=9, default_local_dir="b"))
    hotter = replace(config, data=replace(config.data, max_response_length=7))
    assert settings_of(longer) == settings_of(config) != settings_of(hotter)
    journal = Journal(tmp_path, 4)
    journal.settle({"settings": settings_of(config)}, anew=False)
    run = journal.run
    journal.settle({"settings": settings_of(longer)}, anew=False)
    assert journal.run == run and not caplog.text
    journal.settle({"settings": settings_of(hotter)}, anew=False)
    assert journal.run != run and "of other models or keys: it begins anew" in caplog.text


def test_keys_that_json_would_change_are_no_lines(tmp_path: Path) -> None:
    file = GroupFile(tmp_path / "1-0.jsonl")
    with pytest.raises(TypeError, match="the key 1, of which JSON would make a text"):
        file.append({"sample": 0, "life": 0, "of": "x", "done": "a", "with": "b", "result": [{"x": {1: 2}}]})
    assert not file.lives
