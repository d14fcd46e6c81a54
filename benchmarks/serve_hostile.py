"""`hybridflow serve` under hostile requests: what 64 ordinary requests notice of them, and how fast it ends.

    python benchmarks/serve_hostile.py [--rounds 5] [--source CHECKOUT] [--page]

About five minutes on 2 cores; needs the extras `serve` and `bench`.

For each hostile request a server of its own is started on a tiny random model. In each round 64 ordinary
requests are sent at once three times: alone, with the hostile request among them, and alone again. So the
three are measured under the same load of the machine, and their ratio says what the hostile request costs.
Then servers get SIGTERM at different moments. `--source` runs the server of another checkout, for the table
of what it was. Writes `benchmarks/results/serve_hostile.json` and `.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from hybridflow.models.tiny import create_tiny_model, create_tiny_tokenizer

RESULT = Path(__file__).parent / "results" / "serve_hostile"
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ORDINARY = 64
GRACE_S = 5
"""Seconds that running requests have after SIGTERM."""
PATIENCE_S = 60.0
"""Seconds after which a client gives up."""
NOTHING = float("nan")


def called_with(arguments: str) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return {"messages": messages, "max_tokens": 4}


def plain(prompt: Any = "1", **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4, **fields}


def hostile_requests() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Path and body of each hostile request; the last line of the table is five small ones, one after
    another.
    """
    vocabulary = len(create_tiny_tokenizer())
    small = [
        (PLAIN, plain("\ud800")),
        (CHAT, called_with("[" * 100_000)),
        (PLAIN, plain(logit_bias={"5" * 5_000: 1})),
        (PLAIN, plain(stop_token_ids=list(range(vocabulary)), min_tokens=1)),
        (PLAIN, plain(temperature=1e-45)),
    ]
    return {
        "top_k of 10^30": [(PLAIN, plain(top_k=10**30))],
        "1,000,000 stop_token_ids": [(PLAIN, plain(stop_token_ids=[5] * 1_000_000))],
        "3,000,000 prompts": [(PLAIN, plain([""] * 3_000_000))],
        "3 MB of text": [(PLAIN, plain("a" * 3_000_000))],
        "five requests that were 500": small,
    }


@dataclass
class Wave:
    """64 ordinary requests at once."""

    seconds: list[float] = field(default_factory=list)
    """Latency of each that was answered."""
    failed: int = 0
    cpu_s: float = 0.0
    """CPU time of the server meanwhile."""


@dataclass
class Attack:
    """One hostile request against one server: medians over the rounds."""

    name: str
    answers: list[str]
    hostile_s: float
    before_s: float
    ratio_during: float
    ratio_after: float
    cpu_ratio_after: float
    failed: int
    """Ordinary requests without an answer, over all rounds."""


@contextmanager
def server(model: Path, source: Path | None) -> Iterator[tuple[subprocess.Popen[str], str, dict[str, str]]]:
    """A server process, its address and the headers of its clients."""
    words = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "serve",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
    ]
    words += ["--shutdown-timeout", str(GRACE_S), "--tool-call-parser", "hermes"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if source is not None:
        environment["PYTHONPATH"] = str(source / "src")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1].removesuffix("/v1")
            yield process, url, {"Authorization": f"Bearer {process.stdout.readline().split()[-1]}"}
        finally:
            process.kill()


async def ordinary(client: httpx.AsyncClient, number: int, wave: Wave) -> None:
    body = plain(f"user: {number} + {number} = ", max_tokens=64, ignore_eos=True)
    started = time.perf_counter()
    try:
        answer = await client.post(PLAIN, json=body)
    except httpx.HTTPError as error:
        wave.failed += 1
        if wave.failed == 1:
            print(f"an ordinary request failed: {type(error).__name__}", flush=True)
        return
    if answer.status_code == 200:
        wave.seconds.append(time.perf_counter() - started)
    else:
        wave.failed += 1
        if wave.failed == 1:
            print(f"an ordinary request got {answer.status_code}: {answer.text[:200]}", flush=True)


async def send_hostile(client: httpx.AsyncClient, bodies: list[tuple[str, bytes]]) -> tuple[list[str], float]:
    """Statuses of the hostile requests, one after the other, and the seconds that they took."""
    statuses = []
    started = time.perf_counter()
    for path, content in bodies:
        try:
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            statuses.append(str(answer.status_code))
        except httpx.HTTPError:
            statuses.append("none")
    return statuses, time.perf_counter() - started


async def run_wave(
    client: httpx.AsyncClient, process: psutil.Process, attack: list[tuple[str, bytes]]
) -> Any:
    """The ordinary requests, and the hostile ones as soon as they are sent."""
    wave = Wave()
    before = sum(process.cpu_times()[:2])
    asked = [asyncio.ensure_future(ordinary(client, number, wave)) for number in range(ORDINARY)]
    await asyncio.sleep(0.1)
    told = await send_hostile(client, attack)
    await asyncio.gather(*asked)
    wave.cpu_s = sum(process.cpu_times()[:2]) - before
    return wave, told


async def run_attack(name: str, url: str, headers: dict[str, str], pid: int, rounds: int) -> Attack:
    process = psutil.Process(pid)
    attack = [(path, json.dumps(body).encode()) for path, body in hostile_requests()[name]]
    # a connection each: one that is kept may be closed by the server just as it is used again
    limits = httpx.Limits(max_connections=2 * ORDINARY, max_keepalive_connections=0)
    waves: list[tuple[Wave, Wave, Wave]] = []
    answers: list[str] = []
    took: list[float] = []
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=PATIENCE_S) as client:
        await run_wave(client, process, [])  # the first one warms up
        for _ in range(rounds):
            before, _ = await run_wave(client, process, [])
            during, (statuses, seconds) = await run_wave(client, process, attack)
            after, _ = await run_wave(client, process, [])
            waves.append((before, during, after))
            answers += [status for status in statuses if status not in answers]
            took.append(seconds)
            if before.failed + during.failed + after.failed:
                break
    return Attack(
        name,
        answers,
        statistics.median(took),
        median([middle(before) for before, _, _ in waves]),
        median([middle(during) / middle(before) for before, during, _ in waves]),
        median([middle(after) / middle(before) for before, _, after in waves]),
        median([after.cpu_s / before.cpu_s for before, _, after in waves if not after.failed]),
        sum(wave.failed for three in waves for wave in three),
    )


def middle(wave: Wave) -> float:
    return median(wave.seconds)


def median(values: list[float]) -> float:
    """The median, or no number where there are no values."""
    return statistics.median(values) if values else NOTHING


MOMENTS = {
    "idle": [],
    "64 responses are generated": [(PLAIN, plain(max_tokens=2_000, ignore_eos=True))] * ORDINARY,
    "1,000 long prompts are tokenised": [(PLAIN, plain(["a" * 4_000] * 1_000))],
    "3 MB of text have come": [(PLAIN, plain("a" * 3_000_000))],
    "a long prompt is computed": [(PLAIN, plain("a" * 4_000))] * 8,
}
AT_WORK_CPU_S = 0.5
"""CPU seconds that the server has worked on the requests of a moment before it is told to end."""


async def end_at(
    moment: str, url: str, headers: dict[str, str], process: subprocess.Popen[str]
) -> tuple[float, int]:
    """Seconds from SIGTERM to the end of the process, and how many requests had no answer when it came.

    The signal is sent when the server has worked on them for half a second of CPU time, or has answered all.
    """
    server_process = psutil.Process(process.pid)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE_S) as client:
        before = sum(server_process.cpu_times()[:2])
        asked = [asyncio.ensure_future(client.post(path, json=body)) for path, body in MOMENTS[moment]]
        while not all(each.done() for each in asked):
            await asyncio.sleep(0.02)
            if sum(server_process.cpu_times()[:2]) - before > AT_WORK_CPU_S:
                break
        open_requests = sum(not each.done() for each in asked)
        process.send_signal(signal.SIGTERM)
        started = time.perf_counter()
        await asyncio.to_thread(process.wait, 600)
        seconds = time.perf_counter() - started
        await asyncio.gather(*asked, return_exceptions=True)
    return seconds, open_requests


def measure(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    """All attacks and all ends, and how loaded the machine was."""
    loads = [os.getloadavg()[0]]
    attacks = []
    for name in hostile_requests():
        with server(model, options.source) as (process, url, headers):
            attacks.append(asyncio.run(run_attack(name, url, headers, process.pid, options.rounds)))
            print(row_of(asdict(attacks[-1])), flush=True)
            loads.append(os.getloadavg()[0])
    ends = {}
    for moment in MOMENTS:
        with server(model, options.source) as (process, url, headers):
            ends[moment] = asyncio.run(end_at(moment, url, headers, process))
            seconds, still_open = ends[moment]
            print(f"SIGTERM while {moment}: {seconds:.1f} s, {still_open} at work", flush=True)
            loads.append(os.getloadavg()[0])
    return {
        "date": datetime.date.today().isoformat(),
        "rounds": options.rounds,
        "load": [min(loads), statistics.median(loads), max(loads)],
        "attacks": [asdict(attack) for attack in attacks],
        "ends": ends,
    }


PAGE = """# `hybridflow serve` under hostile requests

`python benchmarks/serve_hostile.py` · {machine}

Written by benchmarks/serve_hostile.py; do not edit. 64 ordinary requests of 64 tokens are sent at once:
alone ("before"), with the hostile request among them ("during") and alone again ("after"), each round in
this order; medians of the rounds, as ratios to before. The machine had other work: its load is given, and
only ratios within a round are compared. Wanted: during ≤ 1.5, after 1.0, all ordinary requests answered, the
hostile one answered with 200 or 400, and the process ended within its {grace} s of grace.
{sections}"""
SECTION = """
## {title}

Measured {date}, {rounds} rounds; load of the machine (1 minute) {low:.1f} to {high:.1f}, median {mid:.1f}, on
{cores} cores.

| hostile request | answer | its s | ordinary before, s | during | after | CPU time after | without answer |
|---|---|---|---|---|---|---|---|
{table}

| SIGTERM while | requests without an answer then | seconds until the process ended |
|---|---|---|
{ends}
"""
TITLES = {"now": "Now", "before": "What it was (the checkout of `--source`)"}


def row_of(attack: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [attack["name"], ", ".join(attack["answers"])]
    names = ("hostile_s", "before_s", "ratio_during", "ratio_after", "cpu_ratio_after")
    cells += [number(attack[name]) for name in names]
    return f"| {' | '.join([*cells, str(attack['failed'])])} |"


def number(value: float | None) -> str:
    """Two digits, or a dash for what could not be measured."""
    return "–" if value is None or value != value else f"{value:.2f}"


def section(kind: str, run: dict[str, Any]) -> str:
    """The tables of one run."""
    low, mid, high = run["load"]
    return SECTION.format(
        title=TITLES[kind],
        date=run["date"],
        rounds=run["rounds"],
        low=low,
        mid=mid,
        high=high,
        cores=os.cpu_count(),
        table="\n".join(row_of(attack) for attack in run["attacks"]),
        ends="\n".join(end_row(moment, *end) for moment, end in run["ends"].items()),
    )


def end_row(moment: str, seconds: float, still_open: int | None) -> str:
    """A line of the table of SIGTERM."""
    count = "not counted" if still_open is None else str(still_open)
    return f"| {moment} | {count} | {seconds:.1f} |"


def write(runs: dict[str, Any], machine: str) -> None:
    """The page and its figures; a run that is not measured again stays as it was."""
    text = json.dumps({"machine": machine, "runs": runs}, indent=2)
    RESULT.with_suffix(".json").write_text(re.sub(r"\bNaN\b", "null", text) + "\n")
    sections = "".join(section(kind, runs[kind]) for kind in TITLES if kind in runs)
    RESULT.with_suffix(".md").write_text(PAGE.format(machine=machine, grace=GRACE_S, sections=sections))


def main() -> int:
    """Measure, print, write; status 1 where a request of the server of this checkout was not answered."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--source", type=Path, help="a checkout whose server is measured (default: this one)")
    parser.add_argument("--page", action="store_true", help="write the page again, of the figures there are")
    options = parser.parse_args()
    known = RESULT.with_suffix(".json")
    told = json.loads(known.read_text()) if known.is_file() else {"runs": {}}
    if options.page:
        write(told["runs"], told["machine"])
        return 0
    with tempfile.TemporaryDirectory() as folder:
        run = measure(options, create_tiny_model(Path(folder) / "tiny"))
    runs = told["runs"]
    runs["now" if options.source is None else "before"] = run
    write(runs, f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread")
    return int(options.source is None and any(attack["failed"] for attack in run["attacks"]))


if __name__ == "__main__":
    raise SystemExit(main())
