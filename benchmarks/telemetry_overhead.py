"""CPU time that telemetry adds to a step of the demo's recipe, against the same step without any.

    python benchmarks/telemetry_overhead.py --steps 8

Several runs of `tiny/grpo` with the same seed are open in one process and take their steps in turn, in an
order that rotates. Step k is the same work in all of them, to the bit. A step's CPU time is that of the whole
process until the threads that send things have come to rest. The collector is a process of its own.
"""

from __future__ import annotations

import argparse
import http.client
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.tracing import LINGER_SECONDS
from hybridflow.observability.trackers.base import Tracker
from hybridflow.trainer.ppo.build import build

PAGE = Path(__file__).resolve().parent / "results" / "telemetry_overhead.md"
TRACE = "actor_rollout_ref.rollout.trace"
REST_SECONDS = 2 * LINGER_SECONDS + 0.5
GOAL = 0.01
OFF = "off"
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Silent(Tracker):
    """Takes nothing: a run without metrics on disk, advice, or anything else."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing."""


@contextmanager
def collector() -> Iterator[str]:
    """Yield the address of a collector in a process of its own."""
    with subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1/traces"
        finally:
            process.terminate()


def dead_address() -> str:
    """Return an address where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/v1/traces"


def variants(live: str, folder: Path) -> dict[str, list[str]]:
    """Overrides of each kind of run."""
    metrics = ["trainer.prometheus.enable=true", "trainer.prometheus.port=0"]
    samples = [*metrics, f"trainer.rollout_data_dir={folder / 'rollouts'}"]
    traces = [*metrics, f"{TRACE}.backend=otel", f"{TRACE}.token2text=true"]
    few = f"{TRACE}.max_samples_per_step_per_worker=4"
    return {
        OFF: [],
        "metrics, advice, samples for the report": metrics,
        "those, and traces of 4 prompts": [*traces, f"{TRACE}.endpoint={live}", few],
        "the same, with a dead collector": [*traces, f"{TRACE}.endpoint={dead_address()}", few],
        "those, and traces of all": [*traces, f"{TRACE}.endpoint={live}"],
        "those, and all samples on disk": samples,
    }


def config_of(model: Path, run: Path, overrides: Sequence[str], steps: int) -> PPOConfig:
    """Return the configuration of a run."""
    settings = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={run}",
        "trainer.logger=[]",
        "trainer.num_threads=1",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "reward.num_workers=0",
        f"trainer.total_training_steps={steps + 1}",
    ]
    return prepare_config(PPOConfig, [*settings, *overrides], recipe="tiny/grpo").config


class Account:
    """Seconds of CPU that the telemetry of one run has used itself, thread by thread."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.called = 0.0
        self.scraped = 0.0
        self.ports = ports_of(trainer)
        trainer.trackers.log = self._timed(trainer.trackers.log)
        trainer.log_samples = self._timed(trainer.log_samples)
        traces = trainer.source.pipeline.traces
        self.threads = [
            each._thread for each in getattr(trainer.trackers, "trackers", []) if hasattr(each, "_thread")
        ]
        if traces is not None:
            traces.add = self._timed(traces.add)
            self.threads.append(traces.queue._thread)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.called += time.thread_time() - before

        return timed

    def scrape(self) -> None:
        """Have the metrics scraped; what the client takes is counted too."""
        before = time.process_time()
        for port in self.ports:
            scraper = http.client.HTTPConnection("127.0.0.1", port)
            scraper.request("GET", "/metrics")
            scraper.getresponse().read()
            scraper.close()
        self.scraped += time.process_time() - before

    @property
    def seconds(self) -> float:
        """What was used so far."""
        begun = [thread for thread in self.threads if thread.ident]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in begun if thread.is_alive()]
        return self.called + self.scraped + sum(time.clock_gettime(clock) for clock in clocks)


def ports_of(trainer: Any) -> list[int]:
    """Return the ports at which a run shows its metrics."""
    found: list[int] = []
    for tracker in getattr(trainer.trackers, "trackers", []):
        if getattr(tracker, "name", "") == "prometheus":
            tracker._put(lambda own: found.append(own.port))
    time.sleep(1.0)
    return found


@dataclass
class Cost:
    """Seconds of CPU of each step: of the whole process, and of telemetry alone."""

    whole: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)


def step_of(account: Account, step: int, cost: Cost) -> None:
    """Do a step and have its metrics scraped; note the CPU time until all is at rest."""
    before = time.process_time()
    own = account.seconds
    account.trainer._train_step(step)
    account.scrape()
    time.sleep(REST_SECONDS)
    if step > 1:
        cost.whole.append(time.process_time() - before)
        cost.own.append(account.seconds - own)


def measure(steps: int) -> dict[str, Cost]:
    """Return what steps cost, by kind of run; the first step of each is left out."""
    os.environ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"] = "1"  # a request to the dead one ends within its step
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = create_tiny_model(folder / "model", seed=0)
        live = stack.enter_context(collector())
        accounts: dict[str, Account] = {}
        for number, (kind, overrides) in enumerate(variants(live, folder).items()):
            trainer: Any = stack.enter_context(
                build(config_of(model, folder / f"run{number}", overrides, steps))
            )
            if kind == OFF:
                trainer.trackers = Silent()
                trainer.log_samples = lambda batch, values, step: {}
            trainer.source.publish(0)
            accounts[kind] = Account(trainer)
            costs[kind] = Cost()
        kinds = list(accounts)
        for step in range(1, steps + 2):
            for kind in kinds:
                step_of(accounts[kind], step, costs[kind])
            kinds = [*kinds[1:], kinds[0]]
    return costs


def page(costs: Mapping[str, Cost], steps: int) -> str:
    """Return the page with the ratios of paired steps, and the shares of telemetry itself."""
    rows = []
    without = costs[OFF].whole
    for kind, cost in costs.items():
        ratios = sorted(mine / other for mine, other in zip(cost.whole, without, strict=True))
        shares = sorted(own / other for own, other in zip(cost.own, without, strict=True))
        share = statistics.median(shares)
        verdict = "within 1 %" if share <= GOAL else "**above 1 %**"
        rows.append(
            f"| {kind} | {statistics.median(cost.whole):.2f} | {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f}) | {1000 * statistics.median(cost.own):.0f} | "
            f"{100 * share:.2f} % ({100 * shares[0]:.2f} to {100 * shares[-1]:.2f}) | {verdict} |"
        )
    return (
        "# What telemetry adds to a step\n\n"
        f"`python benchmarks/telemetry_overhead.py --steps {steps}` wrote this page: CPU time of the\n"
        "driver's process for a step of the demo's recipe `tiny/grpo` (64 prompts of 8 responses, an\n"
        f"untrained tiny model), beside the same step without telemetry, over {steps} pairs in turn. The\n"
        "other one has no metrics on disk, no samples and no advice. Metrics go to Prometheus and are\n"
        "scraped at each step; traces have their texts.\n\n"
        "The *ratio* compares whole steps. The *share* is the CPU time of telemetry itself, of its calls in\n"
        "the loop, of its threads and of the scrape with its client, by the clock of each thread, over that\n"
        "of the step without; the goal of 1 % is held against it, because the machine had other work and\n"
        "whole steps differ by more than that among themselves. Each cell has the median, and the least and\n"
        "the most in brackets.\n\n"
        f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}, one thread.\n\n"
        "| telemetry | step, s | ratio | telemetry, ms | share | goal |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--steps", type=int, default=8, help="pairs to measure")
    steps = words.parse_args().steps
    text = page(measure(steps), steps)
    PAGE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
