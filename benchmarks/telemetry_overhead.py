"""CPU time that telemetry adds to a step of the demo's recipe, against the same step without any.

    python benchmarks/telemetry_overhead.py --steps 8

Several runs of `tiny/grpo` with the same seed are open in one process and take their steps in turn, in an
order that rotates. Step k is the same work in all of them, to the bit. A step's CPU time is that of the whole
process until the threads that send things have come to rest. The collector is a process of its own.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.observability.tracing.queue import LINGER_SECONDS
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
    everything = [
        "trainer.prometheus.enable=true",
        "trainer.prometheus.port=0",
        f"trainer.rollout_data_dir={folder / 'rollouts'}",
    ]
    traces = [*everything, f"{TRACE}.backend=otel", f"{TRACE}.token2text=true"]
    few = f"{TRACE}.max_samples_per_step_per_worker=4"
    return {
        OFF: [],
        "metrics, samples, advice": everything,
        "those, and traces of 4 prompts": [*traces, f"{TRACE}.endpoint={live}", few],
        "those, and traces of all": [*traces, f"{TRACE}.endpoint={live}"],
        "traces of 4, dead collector": [*traces, f"{TRACE}.endpoint={dead_address()}", few],
        "traces of all, dead collector": [*traces, f"{TRACE}.endpoint={dead_address()}"],
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


def ports_of(trainer: Any) -> list[int]:
    """The ports at which a run shows its metrics."""
    found: list[int] = []
    for tracker in getattr(trainer.trackers, "trackers", []):
        if getattr(tracker, "name", "") == "prometheus":
            tracker._put(lambda own: found.append(own.port))
    time.sleep(1.0)
    return found


def step_of(trainer: Any, step: int, ports: Sequence[int]) -> float:
    """Do a step, have its metrics scraped, and return the seconds of CPU until all is at rest."""
    before = time.process_time()
    trainer._train_step(step)
    for port in ports:
        httpx.get(f"http://127.0.0.1:{port}/metrics")
    time.sleep(REST_SECONDS)
    return time.process_time() - before


def measure(steps: int) -> dict[str, list[float]]:
    """Return seconds of CPU of each step, by kind of run; the first step of all is left out."""
    os.environ["OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"] = "1"  # a request to the dead one ends within its step
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = create_tiny_model(folder / "model", seed=0)
        live = stack.enter_context(collector())
        trainers: dict[str, tuple[Any, list[int]]] = {}
        for number, (kind, overrides) in enumerate(variants(live, folder).items()):
            trainer: Any = stack.enter_context(
                build(config_of(model, folder / f"run{number}", overrides, steps))
            )
            if kind == OFF:
                trainer.trackers = Silent()
                trainer.log_samples = lambda batch, values, step: {}
            trainer.source.publish(0)
            trainers[kind] = (trainer, ports_of(trainer))
            seconds[kind] = []
        kinds = list(trainers)
        for step in range(1, steps + 2):
            for kind in kinds:
                took = step_of(trainers[kind][0], step, trainers[kind][1])
                if step > 1:
                    seconds[kind].append(took)
            kinds = [*kinds[1:], kinds[0]]
    return seconds


def page(seconds: Mapping[str, Sequence[float]], steps: int) -> str:
    """Return the page with the ratios of paired steps."""
    rows = []
    for kind, own in seconds.items():
        ratios = sorted(mine / other for mine, other in zip(own, seconds[OFF], strict=True))
        low, middle, high = ratios[0], statistics.median(ratios), ratios[-1]
        verdict = "" if kind == OFF else ("within 1 %" if middle - 1 <= GOAL else "**above 1 %**")
        median = f"{statistics.median(own):.3f}"
        rows.append(f"| {kind} | {median} | {middle:.3f} | {low:.3f} to {high:.3f} | {verdict} |")
    return (
        "# What telemetry adds to a step\n\n"
        f"`python benchmarks/telemetry_overhead.py --steps {steps}` wrote this page: seconds of CPU of the\n"
        "driver's process for a step of the demo's recipe `tiny/grpo` (64 prompts of 8 responses, an\n"
        "untrained tiny model), and the ratio to the same step without telemetry, over\n"
        f"{steps} pairs taken in turn. That one has no metrics on disk, samples and advice. Metrics go\n"
        "to Prometheus and are scraped at each step; all samples are written; traces have their texts.\n"
        "The goal is 1 %.\n\n"
        f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}, one thread; the\n"
        "machine had other work, which disturbs CPU time less than seconds.\n\n"
        "| telemetry | CPU seconds, median | ratio, median | least to most | goal |\n|---|---|---|---|---|\n"
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
