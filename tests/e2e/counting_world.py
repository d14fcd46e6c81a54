"""An environment and tools with effects that are counted: a line of a file for each call, with the call's id.

What a call has done is found by its id, so that one that was cut off is told and not made again. Where the
file `FUSE` says so, the process kills itself within a call, once.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridflow.environments import Environment, Step
from hybridflow.tools import tool
from hybridflow.tools.parsers import TOOL_PARSERS, ToolCall
from hybridflow.tools.parsers.hermes import HermesParser

EFFECTS = "COUNTING_WORLD_EFFECTS"
"""Variable of the environment: the file of the calls."""
FUSE = "COUNTING_WORLD_FUSE"
"""Variable of the environment: the file with a moment, and the number of the call in its process."""
STEPS_OF_AN_EPISODE = 3
_calls = Counter[str]()
_counting = threading.Lock()
"""Calls run beside each other, and each has a number of its own."""


class Counting(Environment):
    """Gives back what it is told, for three turns, and sells things beside them."""

    after_loss = "ask"

    def reset(self, row: Mapping[str, Any]) -> str:
        self.turns = 0
        return f"{self.seed % 10} + 1"

    def state(self) -> int:
        return self.turns

    def restore(self, state: int) -> None:
        self.turns = state

    def step(self, text: str, call_id: str = "") -> Step:
        _note(call_id, text)
        return self._answer(text)

    def outcome(self, call_id: str) -> Step | str | None:
        text = noted().get(call_id)
        if text is None:
            return None
        return self._answer(text) if ".step." in call_id else f"sold {text}"

    @tool
    def buy(self, what: str, call_id: str = "") -> str:
        """Buy something."""
        _note(call_id, what)
        return f"sold {what}"

    def _answer(self, text: str) -> Step:
        self.turns += 1
        reward = sum(map(ord, text)) % 7 / 7
        return Step(f"{text}?", reward=reward, done=self.turns == STEPS_OF_AN_EPISODE)


def counted(call_id: str) -> str | None:
    """Return the answer of a call of `count`, or None where it was not carried out."""
    text = noted().get(call_id)
    return None if text is None else f"{len(text)} letters"


@tool(after_loss="ask", outcome=counted)
def count(what: str, call_id: str = "") -> str:
    """Count letters."""
    _note(call_id, what)
    return f"{len(what)} letters"


def effects() -> list[tuple[str, str]]:
    """Return the id of each call that was carried out, and what it was made with."""
    path = Path(os.environ[EFFECTS])
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def noted() -> dict[str, str]:
    """Return what calls were made with, by their ids."""
    return dict(effects())


def _note(call_id: str, text: str) -> None:
    _burn("before its effect")
    line = json.dumps([call_id, text]) + "\n"
    file = os.open(os.environ[EFFECTS], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, line.encode())
    os.close(file)
    _burn("after its effect")


def _burn(moment: str) -> None:
    with _counting:
        _calls[moment] += 1
        number = _calls[moment]
    fuse = Path(os.environ.get(FUSE, "/no such file"))
    if fuse.exists() and fuse.read_text() == f"{moment} {number}":
        fuse.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


class AnyText(HermesParser):
    """Reads most texts of a model of random weights as calls: by their letters, of one tool or both."""

    text = ""

    def feed(self, text: str) -> list[str | ToolCall]:
        self.text += text
        return []

    def end(self, cut: bool = False) -> list[str | ToolCall]:
        arguments = json.dumps({"what": self.text})
        both = [ToolCall("count", arguments), ToolCall("buy", arguments)]
        choice = sum(map(ord, self.text)) % 4
        if choice == 3:
            return [self.text]
        return [*both[:choice]] if choice else [*both]


def speak() -> None:
    """Have this process read calls so."""
    TOOL_PARSERS["hermes"] = AnyText


HALF_OF_THE_TOKENS_END_A_TURN = (
    f"actor_rollout_ref.rollout.stop_token_ids=[{','.join(map(str, range(0, 112, 2)))}]"
)
KEYS = (
    "algorithm.adv_estimator=grpo",
    f"data.environment='{Path(__file__)}:Counting'",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path='{Path(__file__)}'",
    "actor_rollout_ref.rollout.multi_turn.format=hermes",
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=8",
    "actor_rollout_ref.rollout.multi_turn.max_parallel_calls=2",
    "actor_rollout_ref.rollout.multi_turn.journal=true",
    "actor_rollout_ref.rollout.max_model_len=600",
    "data.max_prompt_length=400",
    HALF_OF_THE_TOKENS_END_A_TURN,
)
"""Keys of a run with it."""
