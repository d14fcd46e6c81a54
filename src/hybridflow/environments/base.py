"""An environment: what a model talks to, turn by turn, in one small class.

reset(row) ──► first observation ──► the model writes ──► step(text) ──► Step(observation, reward, done) ──► …
                                          └── calls of methods marked with @tool are made, and answered

class Guess(Environment):
    def reset(self, row):
        self.number = random.Random(self.seed).randint(1, 20)
        return "I think of a number from 1 to 20. Guess it."

    def step(self, text):
        guess = int(text)
        return Step("higher" if guess < self.number else "lower", done=guess == self.number)
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from hybridflow.tools.base import AfterLoss

if TYPE_CHECKING:  # a process that runs environments, or a person who tries one, needs no torch
    from hybridflow.protocol.prompt import Prompt

EMPTY_PROMPT = [{"role": "user", "content": ""}]
"""Prompt of rows that an environment makes for itself."""

Observation: TypeAlias = "str | Sequence[Mapping[str, Any]] | Sequence[int] | Prompt"
"""What the model reads next: a text (a user's message), messages, parts of text and pictures (a user's
message), token ids, or a prompt of token ids. A part with a picture is `{"type": "image", "image": …}`, in
any form that data have: of PIL, a path, bytes, a data URL; or OpenAI's `{"type": "image_url", …}`.
"""


@dataclass(frozen=True)
class Step:
    """The answer of an environment to one turn of the model."""

    observation: Observation = ""
    """What the model reads next; not read where `done`."""
    reward: float = 0.0
    """Reward of this turn; the reward of the trajectory is the sum over its turns."""
    done: bool = False
    """Whether the trajectory ends here."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Numbers become metrics of the trajectory (means over all); a later turn's replace earlier ones."""


def step_of(answer: Any) -> Step:
    """Convert the return value of `step` to a Step: a bare text is an observation without a reward.

    TypeError for anything else, and for a reward that is no finite number.
    """
    if isinstance(answer, str):
        return Step(answer)
    if not isinstance(answer, Step):
        raise TypeError(f"step() gave {type(answer).__name__}, wanted a Step or a text")
    if not isinstance(answer.reward, Real) or not math.isfinite(answer.reward):
        raise TypeError(f"step() gave the reward {answer.reward!r}, wanted a finite number")
    return answer


class Environment:
    """Base class of environments; one instance serves one trajectory.

    Methods may be `async`. What they raise fails the trajectory (cause "environment"), which is then tried
    again or left out, and never trained as a reward of zero. Methods marked with `@tool` are tools of the
    model: their calls never reach `step`.

    With two further methods, `state()`, which returns anything but None that JSON can write, and
    `restore(state)`, an episode goes on in another object, after the process of the first one was lost
    (`actor_rollout_ref.rollout.multi_turn.journal`). `restore` is called in place of `reset`.
    """

    after_loss: ClassVar[AfterLoss | None] = None
    """Policy for a step whose process was lost before it had answered: `repeat` makes it again, `ask`
    calls `outcome(call_id)`, which returns what the step has returned or None where it was not carried out,
    and `fail` fails the episode. `outcome` is asked in an object that was brought to before the step, and
    where the step was carried out it brings the object to after it: `state()` is asked next. None is
    `repeat` where there is a state. Without a state, `repeat` says that
    all calls of an episode may be made again, to come to where it was; else the episode begins anew.
    """

    seed: int = 0
    """Seed of the group, equal for all its samples; set before `reset`."""
    step_seed: int = 0
    """Seed of this sample alone; set before `reset`."""

    def reset(self, row: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Return what the model reads first; `row` is the data row, with its `extra_info` and `prompt`.

        Without its own `reset`, an environment gives the row's own prompt.
        """
        prompt: Observation = row["raw_prompt"]
        if not prompt or prompt == EMPTY_PROMPT:
            raise ValueError(
                f"{type(self).__name__} has no reset(row) of its own, and the row has no prompt: write one, "
                "or set data.train_files"
            )
        return prompt

    def step(self, text: str) -> Step | Awaitable[Step]:
        """Answer a turn of the model that calls no tool; `text` is without special tokens.

        Without its own `step`, an environment ends with the first such turn.
        """
        return Step(done=True)

    def score(self) -> float | Awaitable[float | None] | None:
        """Return a reward for the whole trajectory, added to those of its turns, or None for none.

        It is asked once, at the end, also where a limit has ended the trajectory.
        """
        return None

    def close(self) -> Awaitable[None] | None:
        """Free the resources of the environment; called once, however the trajectory ended."""
