"""The verdict of a language model on a response, asked at an OpenAI-compatible endpoint.

    template with {question}, {response}, {ground_truth} ──► the judge's answer ──pattern or parser──► verdict

An endpoint that does not answer, an answer without a verdict and one outside of the scale are errors of that
row, which `reward.on_error` decides about and the metrics count by their kinds; none is a silent zero.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridflow.data.plugin import load_object
from hybridflow.errors import ConfigError, RewardError
from hybridflow.tools.http_post import OpenRequests, ask_model

TEMPLATE = """\
Question:
{question}

Right answer, where one is known:
{ground_truth}

Response to judge:
{response}

How good is the response? Think briefly, then end with a line "Score: NUMBER", from 0 (useless) to 10.
"""
PATTERN = r"Score:\s*(-?\d+(?:\.\d+)?)"
FIELDS = ("question", "response", "ground_truth")
MAX_SHOWN = 500
"""Characters of a judge's answer that are kept as the column `judge_answer`, from its end."""


class MalformedVerdict(RewardError):
    """The judge's answer holds no verdict."""


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    messages: Sequence[Mapping[str, Any]] = (),
    *,
    model: str,
    base_url: str | None = None,
    template: str = TEMPLATE,
    pattern: str = PATTERN,
    parser: str | None = None,
    lowest: float = 0.0,
    highest: float = 10.0,
    request_timeout: float = 60.0,
    max_concurrent: int = 32,
    sampling: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the judge's verdict as a score from 0 (`lowest`) to 1 (`highest`).

    `base_url` ends in /v1, as a rule, and is else OPENAI_BASE_URL; OPENAI_API_KEY is the key. `template` is a
    text or a file with some of {question}, {response} and {ground_truth}. The verdict is the number in the
    first group of the last match of `pattern`; or what `parser`, a function at path/to/file.py:name of the
    answer's text, returns: a number of the scale. `sampling` has further fields of the request. Raises
    MalformedVerdict for an answer without a verdict on the scale, ConfigError for a template or parser that
    cannot be used, httpx.HTTPError where the endpoint fails.
    """
    asked = prompt_of(template).format(
        question=_question(messages), response=solution_str, ground_truth=ground_truth
    )
    async with _limit(max_concurrent).here():
        answer = await ask_model(
            [{"role": "user", "content": asked}],
            model=model,
            base_url=base_url,
            timeout=request_timeout,
            **{"temperature": 0.0, **(sampling or {})},
        )
    verdict = _number(answer, pattern, parser)
    if verdict is None or not lowest <= verdict <= highest:
        raise MalformedVerdict(
            f"the judge gave no verdict from {lowest:g} to {highest:g}: {answer[-MAX_SHOWN:]!r}"
        )
    return {"score": (verdict - lowest) / (highest - lowest), "judge_answer": answer[-MAX_SHOWN:]}


def check(options: Mapping[str, Any]) -> None:
    """Raise ConfigError for a template, a pattern or a scale that cannot be used."""
    prompt_of(options.get("template", TEMPLATE))
    pattern = options.get("pattern", PATTERN)
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ConfigError(f"judge: pattern={pattern!r} is no regular expression: {error}") from error
    if groups != 1:
        raise ConfigError(f"judge: pattern={pattern!r} has {groups} groups, wanted one, around the number")
    lowest = options.get("lowest", 0.0)
    highest = options.get("highest", 10.0)
    if not lowest < highest:
        raise ConfigError(f"judge: lowest={lowest} is not below highest={highest}")


@functools.cache
def prompt_of(template: str) -> str:
    """Return the text of a template, which may be the path of a file; ConfigError for another placeholder."""
    if "{" not in template:
        path = Path(template).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"judge: template={template!r} is no file, and no text with {{response}}, {{question}} or "
                "{ground_truth}"
            )
        template = path.read_text(encoding="utf-8")
    try:
        template.format(**dict.fromkeys(FIELDS, ""))
    except (LookupError, ValueError) as error:
        raise ConfigError(
            f"judge: template: {error} is no placeholder; there are {', '.join(FIELDS)}, and a brace of the "
            "text is doubled"
        ) from error
    return template


@functools.cache
def _limit(number: int) -> OpenRequests:
    return OpenRequests(number)


@functools.cache
def _parser(path: str) -> Callable[[str], Any]:
    function: Callable[[str], Any] = load_object(path, key="parser")
    return function


def _number(answer: str, pattern: str, parser: str | None) -> float | None:
    if parser is None:
        found = re.findall(pattern, answer)
        return float(found[-1]) if found else None
    try:
        return float(_parser(parser)(answer))
    except (TypeError, ValueError, LookupError) as error:
        raise MalformedVerdict(f"{parser} found no verdict ({error}) in {answer[-MAX_SHOWN:]!r}") from error


def _question(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the conversation before the response, for a reader: a single user's text unchanged."""
    before = [message for message in messages if message.get("role") != "system"][:-1]
    if len(before) == 1:
        return str(before[0].get("content"))
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in before)
