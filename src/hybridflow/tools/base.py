"""Tools as an agent sees them: a name, a JSON schema, and calls with answers.

Toolset ──open──► a Tool for each of a trajectory's tools ──call(arguments)──► ToolAnswer ──close──► reward
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hybridflow.data.messages import MEDIA_PARTS
from hybridflow.data.pictures import Picture, media_in, pack_media
from hybridflow.errors import ConfigError, HybridFlowError
from hybridflow.processes.errors import CallFailed, CallTooLong, ProcessLost

if TYPE_CHECKING:  # the data of a run need torch, and tools do without it
    from hybridflow.protocol.trajectory import FailureCause

ToolProblem = Literal["", "unknown", "malformed", "raised", "deadline", "too_many", "cut_off"]
"""Why a call has no answer of its tool: there is no tool of that name; its arguments are no JSON object, or
do not fit the schema; the tool raised; it took too long; a turn had more calls than are made; its process was
lost meanwhile (`AfterLoss`). The model reads a sentence about it, and may try again.
"""
AfterLoss = Literal["repeat", "ask", "fail"]
"""Policy for a call whose process was lost before it had answered, when its episode goes on: it is made
again; `outcome(call_id)` says whether it was carried out, and how; it is told that nobody knows.
"""


def checked_after_loss(value: Any, whose: str, *, can_ask: bool) -> None:
    """Raise ConfigError for what is no `AfterLoss`, and for `ask` where there is nobody to be asked."""
    if value not in ("repeat", "ask", "fail"):
        raise ConfigError(f"{whose}: got after_loss={value!r}, wanted repeat, ask or fail")
    if value == "ask" and not can_ask:
        raise ConfigError(f"{whose}: after_loss=ask wants an outcome(call_id) that can be asked, or say fail")


class ToolFailed(HybridFlowError):
    """A tool could not begin or end a trajectory, or its process was lost: the trajectory has failed."""

    def __init__(self, cause: FailureCause, detail: str) -> None:
        super().__init__(detail)
        self.cause: FailureCause = cause


@dataclass(frozen=True)
class ToolAnswer:
    """Answer to a call, which the model reads."""

    text: str = ""
    reward: float = 0.0
    """The reward of the tool for this call; reward functions find it as `extra_info["tool_rewards"]`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of this call; the trackers show their means over trajectories."""
    problem: ToolProblem = ""
    images: tuple[Any, ...] = ()
    """Pictures that the model reads before the text, in any form that data have; `answer_of` makes data URLs
    of them, unless they are addresses.
    """


def answer_of(value: Any) -> ToolAnswer:
    """Convert the return value of a user's tool to an answer.

    A text, a picture of PIL, parts of text and pictures in OpenAI's form, a `ToolAnswer`, an object with a
    `text` and an `image` (verl's ToolResponse), anything that JSON can write, or a tuple (answer, reward) or
    (answer, reward, metrics), where metrics that are no numbers are left out.
    Raises TypeError or ValueError for a picture that cannot be read, for videos, and for a reward that is no
    finite number.
    """
    if isinstance(value, ToolAnswer):
        finite_reward(value.reward)
        return replace(value, images=tuple(map(pack_media, value.images)))
    if isinstance(value, tuple) and 1 <= len(value) <= 3:
        answer, reward, metrics = (*value, None, None)[:3]
        inner = answer_of(answer)
        return ToolAnswer(
            inner.text, finite_reward(reward or 0.0), numbers_of(metrics or {}), images=inner.images
        )
    if isinstance(value, Picture):
        return ToolAnswer(images=(pack_media(value),))
    if _has_pictures(value):
        images = tuple(pack_media(media_in(part)) for part in value if part["type"] != "text")
        return ToolAnswer(" ".join(str(part["text"]) for part in value if "text" in part), images=images)
    if getattr(value, "video", None):
        raise TypeError("the tool answers with a video, wanted a text or pictures")
    given = getattr(value, "image", None) or []
    images = tuple(map(pack_media, given if isinstance(given, list | tuple) else [given]))
    text = getattr(value, "text", value)
    if text is None:
        return ToolAnswer(images=images)
    written = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False, default=str)
    return ToolAnswer(written, images=images)


def _has_pictures(value: Any) -> bool:
    """Return whether a value is a list of parts of text and pictures, with a picture among them."""
    if not isinstance(value, list) or not all(isinstance(part, Mapping) for part in value):
        return False
    pictures = [part for part in value if MEDIA_PARTS.get(str(part.get("type"))) == "image"]
    others = [part for part in value if part.get("type") == "text" and "text" in part]
    return any(map(media_in, pictures)) and len(pictures) + len(others) == len(value)


def numbers_of(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return the values that are numbers, which become metrics."""
    return {str(name): float(value) for name, value in values.items() if isinstance(value, Real)}


def answer_of_failure(name: str, error: CallFailed, deadline_s: float) -> ToolAnswer:
    """Return the message to the model about a failed call. Raises ToolFailed where its process was lost."""
    if isinstance(error, ProcessLost):
        raise ToolFailed(error.cause, f"the tool {name}: its process was lost: {error}") from error
    if isinstance(error, CallTooLong):
        return ToolAnswer(f"{name} took longer than {deadline_s:g} seconds.", problem="deadline")
    return ToolAnswer(f"{name} failed: {error}", problem="raised")


def finite_reward(value: Any) -> float:
    """Return a user's reward as a number. Raises ValueError or TypeError if it is none, or not finite."""
    reward = float(value)
    if not math.isfinite(reward):
        raise ValueError(f"got the reward {reward}, wanted a finite number")
    return reward


class Tool(Protocol):
    """One tool, for one trajectory."""

    @property
    def name(self) -> str:
        """Name by which the model calls it."""

    @property
    def schema(self) -> Mapping[str, Any]:
        """OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""

    @property
    def after_loss(self) -> AfterLoss:
        """Policy for a call that was cut off."""

    @property
    def has_state(self) -> bool:
        """Whether it keeps something of a trajectory between its calls."""

    async def open(self, create_kwargs: Mapping[str, Any]) -> None:
        """Begin a trajectory, with what its row has under `tools_kwargs.NAME.create_kwargs`.

        Raises ToolFailed.
        """

    async def call(self, arguments: dict[str, Any], deadline_s: float, call_id: str) -> ToolAnswer:
        """Answer one call; a failure is an answer with a `problem`. Raises ToolFailed for a lost process."""

    async def outcome(self, call_id: str, deadline_s: float) -> ToolAnswer | None:
        """Return the answer of a call that was cut off, or None where it was not carried out.

        Raises ToolFailed where it cannot say.
        """

    async def close(self, score: bool = False) -> float:
        """End the trajectory; return the tool's reward for the whole of it where `score` asks for it.

        Raises ToolFailed, after everything is freed.
        """
