"""Have a real Prometheus scrape a run and a server, and run every query of the Grafana boards against it.

    python scripts/check_prometheus.py --prometheus /usr/bin/prometheus

It trains a tiny model on a CPU for about a minute, serves another one beside it, and writes
benchmarks/results/prometheus.md. Debian has the program: `apt-get install prometheus`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml
from grafana_boards import BOARDS, board

from hybridflow.models.tiny import create_tiny_model

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "prometheus.md"
SCRAPE_SECONDS = 1
TOKEN = "for-this-machine-only"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EXPERIMENT = "check"
VARIABLES = {"experiment": EXPERIMENT, "model": "model", "__rate_interval": "1m"}
"""Values of the boards' variables; the server calls its model by the name of its folder."""
PATIENCE = 600.0
"""Seconds for a process to answer, on a machine that is busy."""


@dataclass(frozen=True)
class Asked:
    """A query and what Prometheus said: the number of series, and the newest value of the first one."""

    board: str
    panel: str
    query: str
    series: int
    value: str


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program; it is ended with the context."""
    known = {**os.environ, "HYBRIDFLOW_SERVE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file, subprocess.Popen(command, stdout=file, stderr=file, env=known) as process:
        try:
            yield process
        finally:
            process.terminate()


def wait_for(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until an address answers; the log's end is shown where it never does."""
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(address, headers=BEARER, timeout=5.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"{address} does not answer:\n{log.read_text()[-2000:]}")


def trainer(model: Path, folder: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "hybridflow.cli.main", "train", "--recipe", "tiny/grpo"),
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[]",
        "trainer.project_name=boards",
        f"trainer.experiment_name={EXPERIMENT}",
        "trainer.total_training_steps=100000",
        "trainer.test_freq=5",
        "trainer.save_freq=-1",
        "trainer.prometheus.enable=true",
        f"trainer.prometheus.port={port}",
    ]


def server(model: Path, port: int) -> list[str]:
    return [sys.executable, "-m", "hybridflow.cli.main", "serve", str(model), "--port", str(port)]


def complete(address: str, model: str) -> None:
    """Have the server write something, once as a stream and once whole."""
    body: dict[str, Any] = {"model": model, "prompt": "1 + 1 =", "max_tokens": 8}
    for stream in (False, True):
        body["stream"] = stream
        answer = httpx.post(f"{address}/v1/completions", json=body, headers=BEARER, timeout=60.0)
        answer.raise_for_status()


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """Return the series of an instant query."""
    for name, value in VARIABLES.items():
        query = query.replace(f"${name}", value)
    answer = httpx.get(f"{address}/api/v1/query", params={"query": query}, timeout=30.0).json()
    if answer["status"] != "success":
        raise SystemExit(f"{query}: {answer}")
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


def ask_all(address: str) -> list[Asked]:
    """Ask every query of every board."""
    asked = []
    for name in BOARDS:
        for panel in board(name)["panels"]:
            for target in panel["targets"]:
                series = [each for each in ask(address, target["expr"]) if each["value"][1] != "NaN"]
                value = series[0]["value"][1] if series else ""
                asked.append(Asked(name, panel["title"], target["expr"], len(series), value))
    return asked


def page(asked: list[Asked], version: str, seconds: float) -> str:
    """Return the page with the results."""
    with_data = sum(bool(each.series) for each in asked)
    head = (
        "# Boards against a real Prometheus\n\n"
        "`python scripts/check_prometheus.py` wrote this page. Prometheus scraped a run of GRPO on a tiny\n"
        "model (`trainer.prometheus`) and `hybridflow serve` every second, and then answered each query of\n"
        "the boards in `docker/grafana/dashboards/` over its HTTP interface, with the run and the\n"
        "model as the boards' variables and 1m as `$__rate_interval`. **Grafana itself was not\n"
        "run**: it cannot be had on this machine. A test checks the boards' JSON by a schema.\n\n"
        f"- {version}, {platform.system()} on {platform.machine()}\n"
        f"- {with_data} of {len(asked)} queries returned data, after {seconds:.0f} s of scraping\n\n"
        "| board | panel | query | series | first value |\n|---|---|---|---|---|\n"
    )
    lines = [
        f"| {each.board} | {each.panel} | `{each.query}` | {each.series} | {each.value} |" for each in asked
    ]
    return head + "\n".join(lines) + "\n"


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--prometheus", default="prometheus", help="the program")
    words.add_argument("--seconds", type=float, default=90.0, help="most seconds to wait for data")
    given = words.parse_args()
    told = subprocess.run([given.prometheus, "--version"], capture_output=True, text=True, check=True)
    version = (told.stdout or told.stderr).splitlines()[0].partition(" (")[0]
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = create_tiny_model(folder / "model", seed=0)
        ports = {each: free_port() for each in ("run", "server", "prometheus")}
        at = {each: f"http://127.0.0.1:{port}" for each, port in ports.items()}
        jobs: list[dict[str, Any]] = [
            {"job_name": each, "static_configs": [{"targets": [f"127.0.0.1:{ports[each]}"]}]}
            for each in ("run", "server")
        ]
        jobs[1]["authorization"] = {"credentials": TOKEN}
        scraping = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": jobs}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(scraping))
        prometheus = [
            given.prometheus,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
        ]
        commands = {
            "server": (server(model, ports["server"]), "/metrics"),
            "run": (trainer(model, folder / "run", ports["run"]), "/metrics"),
            "prometheus": (prometheus, "/-/ready"),
        }
        for each, (command, path) in commands.items():
            log = folder / f"{each}.log"
            process = stack.enter_context(running(command, log))
            wait_for(at[each] + path, process, log)
        served = httpx.get(f"{at['server']}/v1/models", headers=BEARER).json()["data"][0]["id"]
        started = time.monotonic()
        asked: list[Asked] = []
        while time.monotonic() < started + given.seconds:
            complete(at["server"], served)
            time.sleep(2 * SCRAPE_SECONDS)
            asked = ask_all(at["prometheus"])
            if all(each.series for each in asked):
                break
        seconds = time.monotonic() - started
        up = {each["metric"]["job"]: each["value"][1] for each in ask(at["prometheus"], "up")}
    PAGE.write_text(page(asked, version, seconds), encoding="utf-8")
    empty = [each.query for each in asked if not each.series]
    print(json.dumps({"up": up, "queries": len(asked), "empty": empty, "seconds": round(seconds)}, indent=1))
    if empty or up != {"run": "1", "server": "1"}:
        raise SystemExit("some queries returned nothing")


if __name__ == "__main__":
    main()
