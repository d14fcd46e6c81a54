"""`hybridflow try`: a person plays an environment and calls its tools."""

from __future__ import annotations

import io
import logging
import re
import sys
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.cli.try_view import read_calls
from hybridflow.models.tiny import create_tiny_model
from hybridflow.tools.parsers import ToolCall

SHOP = """
import threading

from hybridflow.environments import Environment, Step
from hybridflow.observability.progress import progress
from hybridflow.tools import tool


class Shop(Environment):
    async def reset(self, row):
        self.price = row["extra_info"]["price"]
        return [{"role": "system", "content": "a shop"}, {"role": "user", "content": f"seed {self.seed}"}]

    @tool
    async def ask(self, thing: str, times: int = 1):
        if thing == "moon":
            raise ValueError("not for sale")
        return f"{thing}: {self.price * times}", 0.25

    def step(self, text):
        if text == "burn":
            raise RuntimeError("on fire")
        if text == "hang":
            print(progress.describe(), flush=True)
            threading.Event().wait()
        return Step([1, 2, 3], reward=1.0, done=text == "bye")

    async def score(self):
        return 10.0

    def close(self):
        print("closed")
"""


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # a command sets up its own
    monkeypatch.chdir(tmp_path)
    Path("shop.py").write_text(SHOP)

    def run(words: str, *lines: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        status = main(["try", *words.split()])
        return status, *capsys.readouterr()

    return run


def test_a_person_plays_to_the_end(play) -> None:
    status, out, _ = play("guess --options largest=1 --seed 3", "what", "1", "not read")
    assert status == 0
    assert "1 to 1?" in out and "[reward 0, num_guesses 1, found 0]" in out
    assert out.endswith("[reward 0.875, num_guesses 2, found 1]\ndone, reward 0.875\n")


def test_tools_answer_and_mistakes_are_told(play) -> None:
    status, out, _ = play(
        'shop.py:Shop --seed 4 --row {"extra_info":{"price":7}}',
        "ask(thing='tea')",
        '{"name": "ask", "arguments": {"thing": "tea", "times": 2}}',
        'so <tool_call>{"name": "ask", "arguments": {"thing": "moon"}}</tool_call>',
        "ask(",
        "ask",
        "<tool_call>{</tool_call>",
        "sell(thing='tea')",
        "ask(thing='tea', times='many')",
        "hello (you)",
    )
    assert status == 0
    assert "system: a shop\nuser: seed 4\ntools: ask(thing=…, times=…)\n" in out
    answers = [line.removeprefix("> ") for line in out.splitlines() if line.startswith("> ")]
    assert answers[:3] == ["tea: 7", "tea: 14", "ask failed: ValueError: not for sale"]
    assert answers.pop(4) == "ask is a tool: call it as ask(thing=…, times=…)"
    assert [answer.partition(",")[0] for answer in answers[3:5]] == ["malformed call"] * 2
    assert answers[5] == "There is no tool 'sell'. The tools are: ask."
    assert answers[6] == "The arguments of ask do not fit: 'many' is not of type 'integer'."
    assert "list of token ids" in answers[7]
    assert out.endswith("score 10\nstopped, reward 11.5\nclosed\n"), "two answers, one step, and the score"


def test_what_an_environment_raises_ends_it_with_the_place(play) -> None:
    status, out, err = play('shop.py:Shop --row {"extra_info":{"price":7}}', "burn")
    assert status == 1 and "Shop.step raised" in err and "shop.py" in err and "on fire" in err
    assert out.endswith("closed\n")
    status, _, err = play("shop.py:Shop")
    assert status == 1 and "Shop.reset raised" in err and "KeyError: 'price'" in err


def test_what_is_waited_for_is_shown_and_has_a_deadline(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.cli.try_view.CALL_DEADLINE", 3.0)
    status, out, err = play('shop.py:Shop --row {"extra_info":{"price":7}}', "hang")
    assert "waiting for Shop.step, at most 3 s (agent.call_deadline)" in out and out.endswith("closed\n")
    assert status == 1 and "Shop.step: step ran past its deadline of 3 seconds" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("gess", "got 'gess', wanted one of adventure"),
        ("guess --options largest", "--options: got 'largest', wanted key=value"),
        ("guess --options larger=3", "do not fit guess"),
        ("guess --row nowhere.json", "--row: got 'nowhere.json', wanted a JSON object or a file"),
        ("guess --row [1]", "--row: got '[1]', wanted a JSON object"),
    ],
)
def test_a_mistake_in_the_words_is_named(play, words: str, message: str) -> None:
    status, out, err = play(words)
    assert status == 1 and message in err and not out


@pytest.mark.parametrize(
    "line", ["10", "look (around)", "f(1)", "f(**x)", "f(x=y)", "(" * 300, "f(x=1", "[1]"]
)
def test_a_line_that_holds_no_call(line: str) -> None:
    assert read_calls(line) == []


def test_two_calls_of_one_line() -> None:
    line = '<tool_call>{"name": "a"}</tool_call> <tool_call>{"name": "b"}</tool_call>'
    assert read_calls(line) == [ToolCall("a", "{}"), ToolCall("b", "{}")]


def test_a_model_plays_and_its_tokens_are_shown(play, tmp_path: Path) -> None:
    model = create_tiny_model(tmp_path / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1)
    words = f"guess --options guesses=2 --seed 5 --model {model}"
    status, out, _ = play(f"{words} --max-new-tokens 1")
    assert status == 0 and "[1 tokens, length]" in out
    status, out, _ = play(words)
    assert status == 0
    assert out.startswith("<|im_start|>user\n1 to 20?<|im_end|>\n<|im_start|>assistant\n")
    assert len(re.findall(r"\[\d+ tokens, stop\]", out)) == 2
    assert "\n<|im_start|>user\na number<|im_end|>\n<|im_start|>assistant\n" in out
    last = out.splitlines()[-1]
    assert last.startswith("finished, reward 0 (turn 1: 0, turn 2: 0)") and "num_guesses 2" in last
