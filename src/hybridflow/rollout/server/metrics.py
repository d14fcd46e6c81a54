"""Counters of the server in Prometheus' text format."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Histogram of observations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(SECONDS, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the lines that Prometheus reads; each bucket includes the smaller ones."""
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum:.6f}"
        yield f"{name}_count{{{labels}}} {total}"


class Metrics:
    """Counters since the start of the server."""

    def __init__(self, model: str) -> None:
        escaped = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._labels = f'model="{escaped}"'
        self.answers: Counter[tuple[str, int]] = Counter()
        """Number of answers by (path, status)."""
        self.prompt_tokens = self.generated_tokens = self.cancelled = 0
        self.seconds = Histogram()
        self.first_token = Histogram()

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Return the page; `gauges` maps names to (meaning, current value)."""
        lines: list[str] = []

        def head(name: str, kind: str, meaning: str) -> str:
            lines.extend((f"# HELP hybridflow_{name} {meaning}", f"# TYPE hybridflow_{name} {kind}"))
            return f"hybridflow_{name}"

        name = head("http_answers_total", "counter", "Answers by path and status.")
        lines += [
            f'{name}{{{self._labels},path="{path}",status="{status}"}} {n}'
            for (path, status), n in sorted(self.answers.items())
        ]
        for short, meaning, value in (
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("generated_tokens_total", "Tokens of responses that were handed on.", self.generated_tokens),
            ("requests_cancelled_total", "Requests whose client went away.", self.cancelled),
        ):
            lines.append(f"{head(short, 'counter', meaning)}{{{self._labels}}} {value}")
        for short, (meaning, number) in gauges.items():
            lines.append(f"{head(short, 'gauge', meaning)}{{{self._labels}}} {number:g}")
        for short, meaning, histogram in (
            ("request_seconds", "From admission to the last token.", self.seconds),
            ("first_token_seconds", "From admission to the first token, of streams.", self.first_token),
        ):
            lines += histogram.lines(head(short, "histogram", meaning), self._labels)
        return "\n".join(lines) + "\n"
