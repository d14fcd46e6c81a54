"""How good a reward is: its verdicts on answers whose verdict is known, and a run's answers worth labelling.

    FILE.jsonl, or cases/NAME.jsonl ──read_cases──► cases ──judge──► verdicts ──Counts──► rates with intervals
    a run's samples ──suggestions──► cases without a verdict, for a person to fill in

A case is a JSON object in a line: `truth`, the `answer` (written as the reward wants it) or the whole
`response`, and `right`, the verdict: true, false, or null where it is not known or not decided. Also
`class`, by which verdicts are counted, `data_source` and `note`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.reward import RewardConfig
from hybridflow.data.answers.stated import after_answer, last_boxed, last_tagged, unboxed_answer
from hybridflow.data.answers.verdict import one_spelling
from hybridflow.errors import DataError
from hybridflow.rewards.dry_run import answer_form
from hybridflow.rewards.load import REWARD_FUNCTIONS, function_of, unknown_source
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.result import ScoreRequest

SHIPPED: dict[str, tuple[str, ...]] = {
    "math": ("answers", "math"),
    "math_dapo": ("answers", "math_dapo"),
    "gsm8k": ("gsm8k",),
    "search_r1": ("search_r1",),
    "code": ("code",),
}
"""The files of cases that judge a built-in reward."""
SHOWN_PROBLEMS = 5
TAKEN = 0.5
"""A response is taken as right from this `acc` on; where the reward returns none, from this score on."""

_FOLDER = Path(__file__).with_name("cases")
_FIELDS = ("truth", "answer", "response", "right", "class", "data_source", "note")
_ESCAPED = re.compile(r"[\x08\x0c]|\t(?:ext|imes|frac|heta)|\r(?:ight|m\b)")
"""What JSON makes of `\\frac`, `\\beta`, `\\text` and the like with one backslash."""
_QUANTILE = 1.959964
"""Of the normal distribution, for intervals that hold in 95 of 100."""


@dataclass(frozen=True)
class Case:
    """A response with its ground truth and the right verdict."""

    response: str
    truth: Any
    right: bool | None
    """None: not known, or not decided; it is not counted."""
    kind: str
    data_source: str
    note: str
    place: str
    """File and line."""


@dataclass(frozen=True)
class JudgedCase:
    """The verdict of a reward on a case."""

    case: Case
    taken: bool
    score: float
    error: str = ""
    """Why there is no verdict; empty where there is one."""

    @property
    def agrees(self) -> bool:
        return not self.error and self.taken == self.case.right


@dataclass
class Counts:
    """Verdicts by what they should be and what they are."""

    right_taken: int = 0
    right_refused: int = 0
    wrong_taken: int = 0
    wrong_refused: int = 0
    failed: int = 0

    @classmethod
    def of(cls, verdicts: Iterable[JudgedCase]) -> Counts:
        counts = cls()
        for one in verdicts:
            name = "failed"
            if not one.error:
                name = f"{'right' if one.case.right else 'wrong'}_{'taken' if one.taken else 'refused'}"
            setattr(counts, name, getattr(counts, name) + 1)
        return counts

    def rates(self) -> dict[str, tuple[int, int]]:
        """Return the two kinds of wrong verdicts, each of all cases that could have it."""
        return {
            "right_refused": (self.right_refused, self.right_refused + self.right_taken),
            "wrong_taken": (self.wrong_taken, self.wrong_taken + self.wrong_refused),
        }


def wilson(count: int, total: int) -> tuple[float, float]:
    """Return Wilson's interval of a rate, in which it lies with 95 %; (0, 1) for no cases."""
    if total == 0:
        return 0.0, 1.0
    rate = count / total
    square = _QUANTILE**2
    middle = (rate + square / (2 * total)) / (1 + square / total)
    half = math.sqrt(rate * (1 - rate) / total + square / (4 * total**2)) * _QUANTILE / (1 + square / total)
    return max(0.0, middle - half), min(1.0, middle + half)


def shipped_cases(name: str) -> list[Case]:
    """Return the cases that come with a built-in reward."""
    form = REWARD_FUNCTIONS[name].answer_form
    return [case for file in SHIPPED[name] for case in read_cases(_FOLDER / f"{file}.jsonl", lambda _: form)]


def own_cases(path: Path, config: RewardConfig) -> list[Case]:
    """Read a user's file, with answers written as the configured reward wants them. Raises DataError."""

    def form_of(source: str) -> str:
        try:
            return answer_form(config, source)
        except DataError as error:
            raise DataError(
                "a bare answer is no program: give the response, as the model writes it"
            ) from error

    cases = read_cases(path, form_of)
    if config.function == "auto" and not config.terms and not config.custom_reward_function.path:
        for case in cases:
            if function_of(case.data_source) is None:
                hint = unknown_source(case.data_source)
                if not case.data_source:
                    hint = "the case has no data_source, and reward.function=auto chooses the reward by it"
                raise DataError(
                    f"{case.place}: {hint}; set reward.function, or give the case its data_source"
                )
    return cases


def read_cases(path: Path, form_of: Callable[[str], str]) -> list[Case]:
    """Read a file of cases; `form_of` a data source is the text in which its reward finds a bare answer.

    Raises DataError with the lines that are wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"--cases {path} cannot be read: {error}; wanted a file of JSON lines in UTF-8, shipped, or one "
            f"of {', '.join(SHIPPED)}"
        ) from error
    cases: list[Case] = []
    problems: list[str] = []
    seen: dict[tuple[str, str, str], Case] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path.name}:{number}"
        try:
            case = _case(line, place, form_of)
        except (DataError, ValueError, RecursionError) as error:
            problems.append(f"{place}: {error}")
            continue
        key = (case.response, json.dumps(case.truth, sort_keys=True), case.data_source)
        earlier = seen.setdefault(key, case)
        if earlier.right is not case.right:
            problems.append(f"{place}: the same pair as {earlier.place}, with another verdict")
        elif earlier is not case:
            problems.append(f"{place}: the same pair as {earlier.place}")
        cases.append(case)
    if problems:
        shown = problems[:SHOWN_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"and {len(problems) - len(shown)} more lines")
        raise DataError("\n".join([f"--cases {path}: not every line is a case", *shown]))
    if not cases:
        raise DataError(f"--cases {path}: the file has no case; wanted JSON lines with {', '.join(_FIELDS)}")
    return cases


def _case(line: str, place: str, form_of: Callable[[str], str]) -> Case:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        hint = " (in JSON a backslash of LaTeX is two, \\\\sqrt)" if "escape" in error.msg else ""
        raise DataError(f"no JSON: {error.msg} at column {error.colno}{hint}") from error
    if not isinstance(row, dict):
        raise DataError(f"got {type(row).__name__}, wanted an object with {', '.join(_FIELDS)}")
    if unknown := [name for name in row if name not in _FIELDS]:
        raise DataError(f"unknown field {', '.join(unknown)}; wanted {', '.join(_FIELDS)}")
    if row.get("truth") is None:
        raise DataError("no truth: wanted the ground truth as the data has it")
    if ("answer" in row) == ("response" in row):
        raise DataError("wanted one of answer (a bare one) and response (the whole text)")
    if "right" not in row or not isinstance(row["right"], (bool, type(None))):
        raise DataError(f"got right={row.get('right')!r}, wanted true, false, or null for not decided")
    texts = {name: row.get(name, "") for name in ("answer", "response", "class", "data_source", "note")}
    for name, value in texts.items():
        if not isinstance(value, str):
            raise DataError(f"got {name}={value!r}, wanted a text")
    if any(_ESCAPED.search(text) for text in (str(row["truth"]), texts["answer"], texts["response"])):
        raise DataError(
            "a control character where LaTeX has a command: in JSON its backslash is two, \\\\frac"
        )
    response = texts["response"]
    if "answer" in row:
        response = form_of(texts["data_source"]).format(texts["answer"])
    kind = texts["class"] or "all"
    return Case(response, row["truth"], row["right"], kind, texts["data_source"], texts["note"], place)


def judge(manager: RewardManager, cases: Sequence[Case]) -> list[JudgedCase]:
    """Return the verdict of the reward on each case that has a right one."""
    decided = [case for case in cases if case.right is not None]
    requests = [ScoreRequest(case.data_source, case.response, case.truth) for case in decided]
    verdicts = []
    for case, outcome in zip(decided, manager.outcomes(requests), strict=True):
        error = f"{outcome.error}: {outcome.detail}" if outcome.error else ""
        verdicts.append(JudgedCase(case, is_taken(outcome.score, outcome.extras), outcome.score, error))
    return verdicts


def is_taken(score: float, values: Mapping[str, Any]) -> bool:
    """Whether a response with these values of the reward counts as right."""
    acc = values.get("acc")
    if isinstance(acc, (bool, int, float)):
        return acc >= TAKEN
    return score >= TAKEN


def classes_of(verdicts: Sequence[JudgedCase]) -> dict[str, Counts]:
    """Return the counts of each class, in the order in which the classes come."""
    kinds: dict[str, list[JudgedCase]] = {}
    for one in verdicts:
        kinds.setdefault(one.case.kind, []).append(one)
    return {kind: Counts.of(members) for kind, members in kinds.items()}


def as_data(verdicts: Sequence[JudgedCase]) -> dict[str, Any]:
    """Return counts, rates with their intervals, and the wrong verdicts, as plain data."""
    rows = {**classes_of(verdicts), "all": Counts.of(verdicts)}
    figures = {
        kind: asdict(counts)
        | {
            f"rate_{name}": {"rate": count / total, "interval": wilson(count, total)}
            for name, (count, total) in counts.rates().items()
            if total
        }
        for kind, counts in rows.items()
    }
    wrong = []
    for one in verdicts:
        if not one.agrees:
            case = asdict(one.case)
            wrong.append({"class": case.pop("kind"), **case} | {"taken": one.taken, "score": one.score})
            wrong[-1]["error"] = one.error
    return {"all": figures.pop("all"), "classes": figures, "misjudged": wrong}


# Pairs of a run that are worth a label

_END = re.compile(r"(?:<\|[^|<>\s]*\|>|</s>|<eos>|<end_of_turn>)+\s*$")
"""Special tokens at the end of a response, which the reward is not given."""
_DRESS = re.compile(
    r"\\(?:left|right|text|textbf|mathrm|mathbf|displaystyle)(?![a-z])|\\[,;:!()\[\] ]|[\s$~*`]|\\(?=[%$])"
)
_FRACTION = re.compile(r"\\[dt]?frac(?:\{([^{}]*)\}\{([^{}]*)\}|(\d)(\d))")
_UNIT = re.compile(r"(?<=\d)(?:%|\^\\circ|°|[a-z]{2}[a-z/^²³\d]*)$|^[$€£]")


def plain_form(answer: str) -> str:
    """Return an answer without what only dresses it: spaces, wrappers and fractions of LaTeX, letter case,
    commas of thousands, a unit, braces and a point at the end. It asks no reward's rule.
    """
    text = _DRESS.sub("", answer.lower())
    text = _FRACTION.sub(lambda found: "/".join(filter(None, found.groups())), text)
    text = text.replace("{", "").replace("}", "").rstrip(".")
    return _UNIT.sub("", re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text))


def stated_answer(response: str) -> str | None:
    """Return the answer of a response: tagged, boxed, behind ####, else the last that it states."""
    marked = response.rpartition("####")[2].strip().partition("\n")[0] if "####" in response else None
    for found in (last_tagged(response, "answer"), last_boxed(response), marked, after_answer(response)):
        if found:
            return found.strip()
    return unboxed_answer(response)


@dataclass(frozen=True)
class _Sample:
    answer: str
    taken: bool
    case: dict[str, Any]
    """The fields of the suggested case that the sample gives."""


def suggestions(folder: Path) -> list[dict[str, Any]]:
    """Return cases from the samples under a run's folder whose verdicts do not go together, one of each kind.

    Equal answers to equal ground truths with different verdicts, answers that differ only by their form with
    different verdicts, and refused answers that are the ground truth but for their form. Raises DataError for
    a folder without scored samples.
    """
    groups: dict[tuple[str, str], list[_Sample]] = {}
    for key, sample in _samples(folder):
        groups.setdefault(key, []).append(sample)
    if not groups:
        raise DataError(
            f"{folder} has no samples with a score, a ground truth and an answer: give the folder of a run "
            "(its samples/ and validation/ are read), or one that trainer.rollout_data_dir or "
            "trainer.validation_data_dir named"
        )
    found: dict[tuple[str, str], dict[str, Any]] = {}

    def add(sample: _Sample, reason: str, note: str) -> None:
        case = {**sample.case, "right": None, "class": reason, "note": note}
        found.setdefault((json.dumps(case["truth"]), case["response"]), case)

    for samples in groups.values():
        for same, reason in ((str.strip, "equal answers"), (plain_form, "equal but for the form")):
            for first, second in _torn(samples, same):
                note = f"took {first.answer} and refused {second.answer}"
                add(first, reason, note)
                add(second, reason, note)
        refused = {sample.answer: sample for sample in samples if not sample.taken}
        for answer, sample in refused.items():
            if any(_is_truth(answer, truth) for truth in _truths(sample.case["truth"])):
                add(sample, "the truth but for the form", f"refused {answer!r}")
    return list(found.values())


def _truths(truth: Any) -> list[str]:
    """Return the right answers of a ground truth, which may have several, also under `target`."""
    if isinstance(truth, Mapping):
        truth = truth.get("target", [])
    return [str(each) for each in (truth if isinstance(truth, (list, tuple)) else [truth])]


def _is_truth(answer: str, truth: str) -> bool:
    if "####" in truth or "boxed" in truth:
        truth = stated_answer(truth) or ""
    return bool(truth) and (
        plain_form(answer) == plain_form(truth) or one_spelling(answer) == one_spelling(truth)
    )


def _torn(samples: Sequence[_Sample], form: Callable[[str], str]) -> Iterator[tuple[_Sample, _Sample]]:
    """Yield for each form of an answer that was taken and refused one sample of both."""
    seen: dict[str, dict[bool, _Sample]] = {}
    for sample in samples:
        seen.setdefault(form(sample.answer), {}).setdefault(sample.taken, sample)
    for both in seen.values():
        if len(both) == 2:
            yield both[True], both[False]


def _samples(folder: Path) -> Iterator[tuple[tuple[str, str], _Sample]]:
    """Yield the scored answers of all samples under a folder, with their ground truth and data source."""
    for file in sorted(folder.rglob("*.jsonl")):
        if not file.stem.isdigit():
            continue
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line or "{}")
            except ValueError as error:
                if number == len(lines):  # the run was killed as it wrote
                    continue
                raise DataError(f"{file}:{number} is no JSON line of a sample: {error}") from error
            if not isinstance(row, dict):
                continue
            truth = row.get("ground_truth")
            response = row.get("response")
            if (
                truth is None
                or not isinstance(response, str)
                or not isinstance(row.get("score"), (int, float))
            ):
                continue
            response = _END.sub("", response)
            source = str(row.get("data_source", ""))
            answer = stated_answer(response)
            if answer:
                case = {"truth": truth, "response": response, "data_source": source}
                yield (json.dumps(truth), source), _Sample(answer, is_taken(row["score"], row), case)
