"""From answers to the numbers of an evaluation, by data source, and the files that show them.

Answer ──AnswerScores, while others are still generated──► ScoredAnswer; a failure is a result without a score
ScoredAnswer, … ──summarise──► results.json, metrics.jsonl; the answers themselves ──► validation/STEP.jsonl

The answers are on disk, one line each: what is there is not generated again.

Answer ──add──► OUT/answers.jsonl ──► answers of the same model, prompts and sampling, after any end
                OUT/evaluation.json: the model, prompts and sampling
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hybridflow.checkpoint.durable import replace_file
from hybridflow.episodes.scoring import conversation_of
from hybridflow.errors import ConfigError
from hybridflow.observability.samples import SampleWriter
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rewards.manager import RewardSession
from hybridflow.rewards.result import ScoreRequest
from hybridflow.trainer.evaluation.estimators import (
    MAX_SUBSETS,
    expected_best,
    expected_majority,
    interval,
    majority_is_exact,
    subset_sizes,
)

ANSWERS = "answers.jsonl"
IDENTITY = "evaluation.json"
NAMED_BY = "--out; data.output_path of verl's commands"
"""The options that name the folder."""
ALL = "all"
"""Name of all data sources together, where there are several."""
RESULTS = "results.json"


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


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer with its score, or the cause why it has none."""

    answer: Answer
    source: str
    truth: Any
    score: float = 0.0
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What the reward function returned besides."""
    failed: str = ""
    """Cause of the failure: that of the answer, or `reward` with the kind of its error."""
    detail: str = ""

    @property
    def numbers(self) -> dict[str, float]:
        """The score as `reward`, and the other results of the reward function that are numbers."""
        found = {
            name: float(value)
            for name, value in self.extras.items()
            if isinstance(value, (bool, int, float)) and not math.isnan(value)
        }
        return {**found, "reward": self.score}


class AnswerScores:
    """The scores of the answers of one evaluation; without a session nothing is scored."""

    def __init__(self, session: RewardSession | None) -> None:
        self._session = session
        self._added: list[ScoredAnswer] = []
        self._to_score: list[int] = []

    def add(
        self, answer: Answer, prompt: Any, source: str, truth: Any, extra_info: Mapping[str, Any]
    ) -> None:
        """Submit an answer for scoring. One that failed, or has its environment's reward, is kept as it is.

        `prompt`, a text or messages, `source`, `truth` and `extra_info` are what the data say of its prompt.
        """
        row = ScoredAnswer(
            answer, source, truth, score=answer.reward or 0.0, failed=answer.failed, detail=answer.detail
        )
        if self._session is not None and not answer.failed and answer.reward is None:
            facts = {**extra_info, **answer.extra_info}
            messages = conversation_of(prompt, answer.response, facts)
            request = ScoreRequest(
                source, answer.response, truth, facts, tuple(answer.response_ids), messages, prompt
            )
            self._session.add(len(self._added), request)
            self._to_score.append(len(self._added))
        self._added.append(row)

    def result(self) -> list[ScoredAnswer]:
        """Wait for all scores; return the answers in the order of prompts and samples."""
        outcomes = self._session.outcomes() if self._to_score and self._session is not None else []
        for place, outcome in zip(self._to_score, outcomes, strict=True):
            row = self._added[place]
            failed = f"reward: {outcome.error}" if outcome.error else ""
            self._added[place] = ScoredAnswer(
                row.answer, row.source, row.truth, outcome.score, outcome.extras, failed, outcome.detail
            )
        return sorted(self._added, key=lambda row: (row.answer.prompt, row.answer.sample))


def summarise(rows: Sequence[ScoredAnswer], *, n: int, seed: int, metrics: bool = True) -> dict[str, Any]:
    """Return, by data source, how many prompts, answers and failures there are, and each metric with its
    value, its interval and the number of prompts that it is about.

    The metrics of `acc`, where every answer has one, else of the score, have no prefix: `mean@n`; for k = 2,
    4, 8, … n `pass@k` (`best@k` where values are not only 0 and 1) and, where the reward returns `pred`,
    `maj@k`. Answers that failed are counted and belong to no metric; a prompt with fewer than k answers
    belongs to none of k. Without `metrics` answers are only counted.
    """
    sources = sorted({row.source for row in rows})
    parts = {source: [row for row in rows if row.source == source] for source in sources}
    if len(sources) > 1:
        parts[ALL] = list(rows)
    found = {source: _counts(part) for source, part in parts.items()}
    for source, part in parts.items():
        whole = [row for row in part if not row.failed]
        found[source]["metrics"] = dict(_metrics(whole, n, seed)) if metrics and whole else {}
    return found


def _counts(rows: Sequence[ScoredAnswer]) -> dict[str, Any]:
    whole = [row for row in rows if not row.failed]
    facts: dict[str, Any] = {
        "prompts": len({row.answer.prompt for row in rows}),
        "answers": len(whole),
        "failed": dict(sorted(Counter(row.failed for row in rows if row.failed).items())),
    }
    if len(whole) < len(rows):
        facts["first_failure"] = next(row.detail for row in rows if row.failed)
    if whole:
        facts["mean_tokens"] = float(np.mean([row.answer.num_tokens for row in whole]))
        facts["truncated"] = float(np.mean([row.answer.finish_reason == "length" for row in whole]))
    return facts


def _metrics(rows: Sequence[ScoredAnswer], n: int, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    numbers = [row.numbers for row in rows]
    names = sorted({name for each in numbers for name in each})
    core = "acc" if all("acc" in each for each in numbers) else "reward"
    groups: dict[int, list[ScoredAnswer]] = {}
    for row in rows:
        groups.setdefault(row.answer.prompt, []).append(row)
    values = {prompt: [row.numbers[core] for row in group] for prompt, group in groups.items()}
    yield f"mean@{n}", _estimate([float(np.mean(each)) for each in values.values()])
    best = "pass" if {value for each in values.values() for value in each} <= {0.0, 1.0} else "best"
    votes = all(row.extras.get("pred") is not None for row in rows)
    for k in subset_sizes(n):
        enough = [prompt for prompt, group in groups.items() if len(group) >= k]
        if n == 1 or not enough:
            continue
        yield f"{best}@{k}", _estimate([expected_best(values[prompt], k) for prompt in enough])
        if votes:
            majorities = [
                expected_majority(
                    values[prompt],
                    [str(row.extras["pred"]) for row in groups[prompt]],
                    k,
                    derive_seed(seed, "majority", prompt),
                )
                for prompt in enough
            ]
            exact = majority_is_exact(max(len(group) for group in groups.values()), k)
            how = "every set of k" if exact else f"{MAX_SUBSETS} drawn sets of k"
            yield f"maj@{k}", {**_estimate(majorities), "over": how}
    for name in names:
        if name != core:
            means = [
                float(np.mean(found))
                for group in groups.values()
                if (found := [row.numbers[name] for row in group if name in row.numbers])
            ]
            yield f"{name}/mean@{n}", _estimate(means)


def _estimate(values: Sequence[float]) -> dict[str, Any]:
    bounds = interval(values)
    return {
        "value": float(np.mean(values)),
        "low": None if bounds is None else bounds[0],
        "high": None if bounds is None else bounds[1],
        "prompts": len(values),
    }


def write_results(folder: Path, results: Mapping[str, Any], rows: Sequence[ScoredAnswer], step: int) -> None:
    """Write `results.json`, and the metrics and answers in the form that `hybridflow view` shows."""
    replace_file(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    metrics = {
        f"val-core/{source}/{name}": estimate["value"]
        for source, found in results.items()
        for name, estimate in found["metrics"].items()
    }
    replace_file(folder / "metrics.jsonl", json.dumps({"step": step, **metrics}) + "\n")
    SampleWriter(folder / "validation", keep_to=-1).write([_sample(row) for row in rows], step)


def _sample(row: ScoredAnswer) -> dict[str, Any]:
    """Return an answer as a row of samples, as `observability.samples` describes them."""
    answer = row.answer
    info = dict(answer.extra_info)
    sample: dict[str, Any] = {
        "prompt": answer.question,
        "response": answer.response,
        "num_tokens": answer.num_tokens,
        "ground_truth": row.truth,
        "finish_reason": answer.finish_reason,
        "data_source": row.source,
        **row.extras,
        "uid": f"prompt {answer.prompt}",
        "row_id": answer.sample,
    }
    if info.get("messages"):
        sample["messages"] = info["messages"]
    if row.failed:
        return {**sample, "failed": row.failed, "detail": row.detail}
    return {**sample, "score": row.score}
