"""Environments of other libraries, in the protocol of `remote.py`. It is run as a program, by the interpreter
that has the library, and needs nothing else: python worlds.py gymnasium '{"id": "Taxi-v3"}'
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any


class Gymnasium:
    """A text environment of gymnasium, such as the toy texts: `id` and `options` go to gymnasium.make.

    Where actions are numbers, the model writes one of `actions` (names in their order), or the number.
    """

    def __init__(self, id: str, actions: list[str] | None = None, **options: Any) -> None:
        import gymnasium

        self.env = gymnasium.make(id, **options)
        self.actions = [name.lower() for name in actions or ()]

    def reset(self, seed: int, row: dict[str, Any]) -> Any:
        observation, _ = self.env.reset(seed=seed % 2**31)
        return self._shown(observation)

    def step(self, text: str) -> dict[str, Any]:
        action = self._action(text)
        if action is None or not self.env.action_space.contains(action):
            wanted = ", ".join(self.actions) or self.env.action_space
            return {
                "observation": f"No action: {text.strip()[:50]!r}. Wanted: {wanted}.",
                "extra": {"invalid": 1},
            }
        observation, reward, terminated, truncated, _ = self.env.step(action)
        return {
            "observation": self._shown(observation),
            "reward": float(reward),
            "done": bool(terminated or truncated),
        }

    def _action(self, text: str) -> Any:
        if not hasattr(self.env.action_space, "n"):
            return text
        words = text.lower().split()
        named = [self.actions.index(word) for word in words if word in self.actions]
        found = named or [int(number) for number in re.findall(r"\d+", text)]
        return found[-1] if found else None

    def _shown(self, observation: Any) -> str:
        if self.env.render_mode == "ansi":
            # colours show where the player is: brackets do so in plain text
            return re.sub(r"\x1b\[[0-9;]*m(.*?)\x1b\[0m", r"[\1]", str(self.env.render()))
        return str(observation)


class TextArena:
    """A game for one player of TextArena: `id` as in textarena.make. The reward comes with the end.

    An observation that repeats the earlier ones is cut to what is new.
    """

    def __init__(self, id: str, **options: Any) -> None:
        self.options = {"env_id": id, **options}

    def reset(self, seed: int, row: dict[str, Any]) -> Any:
        import textarena

        self.env = textarena.make(**self.options)
        self.env.reset(num_players=1, seed=seed % 2**31)
        self.seen = ""
        return self._new()

    def step(self, text: str) -> dict[str, Any]:
        done, _ = self.env.step(action=text)
        if not done:
            return {"observation": self._new()}
        rewards, _ = self.env.close()
        return {"reward": float(rewards[0]), "done": True}

    def _new(self) -> str:
        text = str(self.env.get_observation()[1])
        new = text.removeprefix(self.seen)
        self.seen = text
        return new


class OpenEnv:
    """A server of OpenEnv at `base_url`; `action` and `observation` name the fields of its messages that are
    the text (None: the whole observation as JSON).
    """

    def __init__(self, base_url: str, action: str = "message", observation: str | None = None) -> None:
        from openenv.core.generic_client import GenericEnvClient

        self.env = GenericEnvClient(base_url=base_url).sync()
        self.action = action
        self.observation = observation

    def reset(self, seed: int, row: dict[str, Any]) -> Any:
        return self._shown(self.env.reset(seed=seed % 2**31).observation)

    def step(self, text: str) -> dict[str, Any]:
        result = self.env.step({self.action: text})
        return {
            "observation": self._shown(result.observation),
            "reward": float(result.reward or 0.0),
            "done": bool(result.done),
        }

    def _shown(self, observation: dict[str, Any]) -> str:
        if self.observation is None:
            return json.dumps(observation)
        return str(observation[self.observation])


WORLDS = {"gymnasium": Gymnasium, "textarena": TextArena, "openenv": OpenEnv}


def main(name: str, options: str) -> None:
    """Answer requests until stdin ends; whatever the library prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    world: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if name not in WORLDS:
                raise ValueError(f"there is no world {name!r}, only {', '.join(WORLDS)}")
            if world is None:
                world = WORLDS[name](**json.loads(options))
            if request["method"] == "reset":
                answer = {"observation": world.reset(request["seed"], request["row"])}
            else:
                answer = world.step(request["text"])
        except Exception as error:  # another's library: anything may come out of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
