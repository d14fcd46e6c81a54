"""An engine without a model, whose sessions follow a script."""

from __future__ import annotations

import sys
from pathlib import Path

from hybridflow.rollout.base import EngineSession, GenerationRequest
from hybridflow.rollout.session_engine import SessionEngine

sys.path.insert(0, str(Path(__file__).parent))

from fake_session import FakeSession


def count_up(request: GenerationRequest) -> range:
    """As many tokens as the request may have: the numbers after the last one of its prompt."""
    first = request.prompt_token_ids[-1] + 1
    return range(first, first + request.sampling.max_tokens)


class ScriptedSession(FakeSession):
    """Gives what was begun before its own tokens, as engines do."""

    def __init__(self, engine: ScriptedEngine) -> None:
        super().__init__(count_up, seconds=engine.seconds, dies_at=engine.dies_at)
        self.engine = engine

    def add(self, requests):  # type: ignore[no-untyped-def]
        self.version = self.engine.version
        self.engine.joined.append([request.request_id for request in requests])
        outputs = super().add(requests)
        for request in requests:
            begun = request.partial_response
            self._rows[request.request_id] = (request, list(begun.token_ids), list(begun.policy_versions))
        self._waiting.clear()
        return outputs

    def close(self) -> None:
        super().close()
        self.engine._closed()


class ScriptedEngine(SessionEngine):
    """Counts on from the end of a prompt, a token a step of `seconds`; `dies_at` that step of a session."""

    def __init__(self, *, seconds: float = 0.0, dies_at: int | None = None) -> None:
        super().__init__()
        self.seconds = seconds
        self.dies_at = dies_at
        self.version = 0
        self.joined: list[list[int]] = []
        """Ids of the requests of each call of `add`."""
        self.wakes = 0
        self.sleeps = 0

    @property
    def policy_version(self) -> int:
        return self.version

    def _new_session(self, closed: bool) -> EngineSession:
        return ScriptedSession(self)

    def wake_up(self, tags: object = None) -> None:
        self.wakes += 1

    def sleep(self, level: int = 1) -> None:
        self.sleeps += 1

    def set_version(self, version: int) -> None:
        self.version = version

    def update_weights(self, weights: object, version: int) -> None:
        self.version = version
