"""Write docs/metrics.md from the glossary of metrics; with --check only test whether it is fresh.

python scripts/metric_docs.py [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from hybridflow.observability.glossary import OF_VALIDATION, PLACEHOLDERS, MetricEntry, glossary
from hybridflow.observability.timing import WORDS

TARGET = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

INTRODUCTION = f"""\
# Metrics

<!-- Written by scripts/metric_docs.py from the glossary in src/hybridflow/observability; do not edit. -->

A run logs these metrics after each step. All of them go to `metrics.jsonl` in the run folder, and to every
tracker in `trainer.logger`. The last column names what else reads a metric:

- *line*: the line that the console prints for a step;
- *report*: the curves and tiles that `hybridflow view` shows without being asked (any other metric can be
  chosen there);
- *health*: the warnings about a run that goes wrong; any metric that is not finite is one too;
- *reward watch*: the signs of a policy that only pleases its reward ([rewards](rewards.md)).

*Better* says in which direction a run improves, where there is such a direction. The unit `1` is that of a
number without one. Scores of a reward have the reward's own unit. A run has the metrics of what it does: one
without a critic has no `critic/vf_loss`. A loss, an environment or an agent of yours may log more.
In validation, the metrics of agents stand under `{OF_VALIDATION}agent/`.
"""


def main(arguments: list[str]) -> int:
    """Return exit status 0, or 1 where --check finds the page stale."""
    text = render()
    if "--check" in arguments:
        if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write(f"{TARGET} is not what the glossary says: run python scripts/metric_docs.py\n")
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


def render() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, entries in glossary().items():
        parts.append(f"## {title}\n")
        parts.append(_table(("metric", "meaning", "unit", "better", "also read by"), map(_row, entries)))
    parts.append("## Placeholders\n")
    parts.append(_table(("placeholder", "stands for"), _placeholders()))
    parts.append("## Parts of a step\n")
    parts.append(_table(("metric", "what the run does meanwhile"), _sections()))
    return "\n".join(parts)


def _row(entry: MetricEntry) -> tuple[str, ...]:
    return (f"`{entry.name}`", entry.meaning, entry.unit, entry.better, ", ".join(entry.feeds))


def _placeholders() -> Iterator[tuple[str, ...]]:
    for name, (_, text) in PLACEHOLDERS.items():
        yield (f"`{{{name}}}`", text)


def _sections() -> Iterator[tuple[str, ...]]:
    yield ("`timing_s/step`", "the whole step, its validation included")
    for section, words in WORDS.items():
        yield (f"`timing_s/{section}`", words)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
