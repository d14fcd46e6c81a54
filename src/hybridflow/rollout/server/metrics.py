"""The counts of the server, as Prometheus reads them: under our own names, and under those of vLLM's server.

Boards and alerts that were made for vLLM work with the second ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from prometheus_client import Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridflow.rollout.client import Replica

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """Counts since the start of the server."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.answers: Counter[tuple[str, int]] = Counter()
        """Number of answers by (path, status)."""
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.cancelled = 0
        self.seconds = Histogram("seconds", "", registry=None, buckets=SECONDS)
        self.first_token = Histogram("seconds", "", registry=None, buckets=SECONDS)

    def page(self, open_choices: int, replicas: Sequence[Replica]) -> str:
        """Return the page in Prometheus' text format; what is open now comes from the arguments."""
        load = sum(replica.load for replica in replicas)
        waiting = sum(replica.waiting for replica in replicas)
        alive = sum(replica.failure is None for replica in replicas)
        answers = CounterMetricFamily(
            "hybridflow_http_answers", "Answers by path and status.", labels=["model", "path", "status"]
        )
        for (path, status), count in sorted(self.answers.items()):
            answers.add_metric([self._model, path, str(status)], count)
        metrics: list[Metric] = [answers]

        def add(kind: Any, name: str | None, vllm: str | None, meaning: str, *value: Any) -> None:
            for label, prefix, known_as in (("model", "hybridflow_", name), ("model_name", "vllm:", vllm)):
                if known_as is not None:
                    family = kind(prefix + known_as, meaning, labels=[label])
                    family.add_metric([self._model], *value)
                    metrics.append(family)

        counter = CounterMetricFamily
        gauge = GaugeMetricFamily
        times = HistogramMetricFamily
        generated = "Tokens of responses that were handed on."
        whole = "From admission to the last token."
        first = "From admission to the first token, of streams."
        add(counter, "prompt_tokens", "prompt_tokens", "Tokens of prompts.", self.prompt_tokens)
        add(counter, "generated_tokens", "generation_tokens", generated, self.generated_tokens)
        add(counter, "requests_cancelled", None, "Requests whose client went away.", self.cancelled)
        add(gauge, "responses_open", None, "Responses in work or waiting.", open_choices)
        add(gauge, "responses_in_engines", None, "Responses that the engines have not answered.", load)
        add(gauge, "replicas_alive", None, "Engines that serve.", alive)
        add(gauge, None, "num_requests_running", "Requests that get tokens.", load - waiting)
        add(gauge, None, "num_requests_waiting", "Requests without room in an engine.", waiting)
        add(times, "request_seconds", "e2e_request_latency_seconds", whole, *_values(self.seconds))
        add(times, "first_token_seconds", "time_to_first_token_seconds", first, *_values(self.first_token))
        return generate_latest(_Page(metrics)).decode()


def _values(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets of a histogram, each with the count of all values up to it, and their sum."""
    (family,) = histogram.collect()
    buckets = [(each.labels["le"], each.value) for each in family.samples if each.name == "seconds_bucket"]
    return buckets, next(each.value for each in family.samples if each.name == "seconds_sum")


class _Page(Collector):
    """A page's metrics, as they are written."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics
