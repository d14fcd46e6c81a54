"""The counts of the server, as Prometheus reads them: under our own names, and under those of vLLM's server.

Boards and alerts that were made for vLLM work with the second ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

Gauges = dict[str, tuple[str, float]]
"""Current values by name, each with its meaning."""


class Histogram:
    """Histogram of observations in seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(SECONDS, value)] += 1
        self._sum += value

    def family(self, name: str, meaning: str, label: str, model: str) -> HistogramMetricFamily:
        """Return it for Prometheus; each bucket includes the smaller ones."""
        buckets = []
        total = 0
        for bound, count in zip((*map(str, SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family = HistogramMetricFamily(name, meaning, labels=[label])
        family.add_metric([model], buckets, self._sum)
        return family


class Metrics:
    """Counts since the start of the server."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.answers: Counter[tuple[str, int]] = Counter()
        """Number of answers by (path, status)."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled = 0
        self.seconds = Histogram()
        self.first_token = Histogram()

    def text(self, gauges: Gauges, vllm_gauges: Gauges) -> str:
        """Return the page in Prometheus' text format, with the current values of both kinds of gauges."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Page([*self._own(gauges), *self._as_vllm(vllm_gauges)]))
        page: bytes = generate_latest(registry)
        return page.decode()

    def _own(self, gauges: Gauges) -> Iterator[Metric]:
        answers = CounterMetricFamily(
            "hybridflow_http_answers", "Answers by path and status.", labels=["model", "path", "status"]
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([self._model, path, str(status)], count)
        yield answers
        yield self._counter("hybridflow_prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        yield self._counter(
            "hybridflow_generated_tokens", "Tokens of responses that were handed on.", self.generated_tokens
        )
        yield self._counter(
            "hybridflow_requests_cancelled", "Requests whose client went away.", self.cancelled
        )
        for name, (meaning, value) in gauges.items():
            yield self._gauge(f"hybridflow_{name}", meaning, value)
        for name, meaning, histogram in (
            ("request_seconds", "From admission to the last token.", self.seconds),
            ("first_token_seconds", "From admission to the first token, of streams.", self.first_token),
        ):
            yield histogram.family(f"hybridflow_{name}", meaning, "model", self._model)

    def _as_vllm(self, gauges: Gauges) -> Iterator[Metric]:
        label = "model_name"
        yield self._counter("vllm:prompt_tokens", "Tokens of prompts.", self.prompt_tokens, label)
        yield self._counter(
            "vllm:generation_tokens", "Tokens of responses that were handed on.", self.generated_tokens, label
        )
        for name, (meaning, value) in gauges.items():
            yield self._gauge(f"vllm:{name}", meaning, value, label)
        for name, meaning, histogram in (
            ("e2e_request_latency_seconds", "From admission to the last token.", self.seconds),
            (
                "time_to_first_token_seconds",
                "From admission to the first token, of streams.",
                self.first_token,
            ),
        ):
            yield histogram.family(f"vllm:{name}", meaning, label, self._model)

    def _counter(self, name: str, meaning: str, value: float, label: str = "model") -> CounterMetricFamily:
        family = CounterMetricFamily(name, meaning, labels=[label])
        family.add_metric([self._model], value)
        return family

    def _gauge(self, name: str, meaning: str, value: float, label: str = "model") -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, meaning, labels=[label])
        family.add_metric([self._model], value)
        return family


class _Page:
    """A page's metrics, as a registry collects them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families
