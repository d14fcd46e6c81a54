"""The answers of an evaluation on disk, one line each: what is there is not generated again.

Answer ──add──► OUT/answers.jsonl ──► answers of the same model, prompts and sampling, after any end
                OUT/evaluation.json: the model, prompts and sampling
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.durable import replace_file
from hybridflow.errors import ConfigError

ANSWERS = "answers.jsonl"
IDENTITY = "evaluation.json"
NAMED_BY = "--out; data.output_path of verl's commands"
"""The options that name the folder."""


@dataclass(frozen=True)
class Answer:
    """One answer to a prompt, before it is scored."""

    prompt: int
    """Number of the prompt in the data."""
    sample: int
    """Number of the answer among those to its prompt, from 0."""
    question: str
    """The prompt as the model read it."""
    response: str
    """What a reward function reads: of several turns, the text of the last one."""
    finish_reason: str
    """`stop`, or `length` where a limit ended it."""
    num_tokens: int
    """Tokens that the model has sampled."""
    response_ids: Sequence[int] = ()
    """Ids of these tokens, in the order of the calls to the model."""
    turns: int = 1
    """Calls to the model."""
    reward: float | None = None
    """Score that an environment or an agent has given; None: the reward function scores it."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further facts for the reward function, the conversation of an agent among them (`messages`)."""
    failed: str = ""
    """Cause of its failure, as `environment` or `deadline`; empty where there is an answer."""
    detail: str = ""
    """What went wrong, for people."""


class AnswerFile:
    """The answers in the folder of an evaluation; of those that failed nothing is kept but the line.

    `identity` is what they depend on, as flat JSON. Raises ConfigError where the folder has answers of
    another identity, or is used for something else.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.path = folder / ANSWERS
        self.answers: dict[tuple[int, int], Answer] = {}
        """Answers that have not failed, by prompt and sample."""
        whole = b""
        if self.path.exists():
            # a line that was being written when the process ended has no end
            whole = self.path.read_bytes().rpartition(b"\n")[0]
            whole += b"\n" if whole else b""
        # a start that failed before any answer leaves an empty file, and binds no later one
        unused = self.path.exists() and not whole
        check_identity(folder, json.loads(json.dumps(identity, default=str)), replaces=unused)
        for line in whole.decode("utf-8").splitlines():
            answer = Answer(**json.loads(line))
            if not answer.failed:
                self.answers[answer.prompt, answer.sample] = answer
        self._file = self.path.open("ab")
        self._file.truncate(len(whole))

    def add(self, answer: Answer) -> None:
        """Write an answer; it survives the end of this process, whatever ends it."""
        facts = asdict(answer)
        if answer.reward is None:
            del facts["reward"]  # the reward function scores it later; a null would look like a lost score
        line = json.dumps(facts, default=str)  # ASCII, so that a line is a line for every reader
        self._file.write(line.encode("ascii") + b"\n")
        self._file.flush()
        if not answer.failed:
            self.answers[answer.prompt, answer.sample] = answer

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_identity(folder: Path, identity: Mapping[str, Any], *, replaces: bool = False) -> None:
    """Write what the answers depend on, or raise ConfigError where it is not what the folder's depend on,
    unless it `replaces` that.
    """
    path = folder / IDENTITY
    if not path.exists():
        others = sorted(each.name for each in folder.iterdir() if not each.name.startswith("."))
        if others:
            raise ConfigError(
                f"{folder} holds {others[0]} and no evaluation: give the name of a new folder ({NAMED_BY})"
            )
    if replaces or not path.exists():
        replace_file(path, json.dumps(identity, indent=2) + "\n")
        return
    before = json.loads(path.read_text(encoding="utf-8"))
    changed = [
        f"{key} was {before.get(key)} and is {identity.get(key)}"
        for key in sorted({*before, *identity})
        if before.get(key) != identity.get(key)
    ]
    if changed:
        raise ConfigError(
            f"{folder} holds answers that these would not belong to: {'; '.join(changed[:5])}. Give "
            f"another folder ({NAMED_BY}), or remove it"
        )
