"""`hybridflow serve` under 1,000 requests at once: all answered or cancelled, no row left behind, memory
flat.

    python benchmarks/serve_load.py [--requests 1000] [--waves 10] [--cache-mib N]

About five minutes on 2 cores; needs the extras `serve` and `bench`.

A tiny random model of 0.4 M parameters is served by a process of its own, as users start it. Each wave sends
its requests at once: half of them streams, with different stop conditions (texts, token ids, length, several
responses); a third goes away at a random time; some are malformed, some have no token. After each wave: what
became of the requests, what the server still holds, its memory, its open files. Writes
`benchmarks/results/serve_load.json` and `.md`.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from hybridflow.models.tiny import create_tiny_model
from hybridflow.rollout.memory import free_memory

RESULT = Path(__file__).parent / "results" / "serve_load"
CONDITIONS: tuple[dict[str, Any], ...] = (
    {},
    {"stop": ["1", "= ", "zz"]},
    {"stop_token_ids": [20, 30]},
    {"ignore_eos": True},
    {"max_tokens": 1},
    {"n": 3, "seed": 1},
    {"min_tokens": 10, "top_p": 0.9, "temperature": 0.7},
)
PAGE = """# `hybridflow serve` under load

{date} · `{command}` · {machine}

Written by benchmarks/serve_load.py; do not edit. {waves} waves of {requests} requests at once to one server
with a model of 0.4 M parameters, up to 64 tokens a response. Wanted: all answered or cancelled, none failed,
no response left in work, memory flat.

| wave | answered | left | 400 | 401 | failed | in work | MiB | open files | seconds | median s | 99 % s |
|---|---|---|---|---|---|---|---|---|---|---|---|
{table}

Keys and values have {cache}. Earlier responses are kept for prompts that begin like them, 1,024 at most.
Over the last {last} waves the server's memory changed by {growth:+.1f} MiB.
"""


@dataclass
class Wave:
    """What became of the requests of one wave."""

    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """Of those that were answered."""
    left_in_work: float = 0.0
    memory_mib: float = 0.0
    files: int = 0
    total: float = 0.0


def is_whole(text: str, stream: bool, n: int) -> bool:
    """Every response of the answer has its reason to end."""
    if not stream:
        return [choice["finish_reason"] in ("stop", "length") for choice in json.loads(text)["choices"]] == [
            True
        ] * n
    events = [line.removeprefix("data: ") for line in text.split("\n") if line]
    ended = {
        c["index"]
        for event in events[:-1]
        for c in json.loads(event).get("choices", [])
        if c["finish_reason"] in ("stop", "length")
    }
    return events[-1] == "[DONE]" and ended == set(range(n))


async def ask(client: httpx.AsyncClient, draw: random.Random, wave: Wave) -> None:
    """One request, and what became of it."""
    kind, stream, leave = (
        draw.random(),
        draw.random() < 0.5,
        draw.uniform(0.0, 6.0) if draw.random() < 1 / 3 else None,
    )
    condition = draw.choice(CONDITIONS)
    body: dict[str, Any] = {
        "prompt": f"user: {draw.randint(0, 99)} + {draw.randint(0, 99)} = ",
        "max_tokens": 64,
        "stream": stream,
        **condition,
    }
    due, headers = "200", {}
    if kind < 0.05:
        due, body = "400", {**body, "temperature": -1}
    elif kind < 0.1:
        due, headers = "401", {"Authorization": "Bearer wrong"}
    started = time.perf_counter()
    try:
        async with asyncio.timeout(leave):
            answer = await client.post("/v1/completions", json=body, headers=headers)
    except TimeoutError:
        wave.outcomes["left"] += 1
        return
    except httpx.HTTPError as error:
        wave.outcomes[f"failed: {type(error).__name__}"] += 1
        return
    got = str(answer.status_code)
    if got != due or (got == "200" and not is_whole(answer.text, stream, body.get("n", 1))):
        wave.outcomes[f"failed: {got} where {due} was due"] += 1
        return
    wave.outcomes[got] += 1
    if got == "200":
        wave.seconds.append(time.perf_counter() - started)


async def run_wave(url: str, token: str, requests: int, seed: int, server: psutil.Process) -> Wave:
    """All at once; then until the server has nothing in work."""
    wave, draw = Wave(), random.Random(seed)
    limits = httpx.Limits(max_connections=requests, max_keepalive_connections=0)
    headers = {"Authorization": f"Bearer {token}"}
    started = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=300) as client:
        await asyncio.gather(*(ask(client, draw, wave) for _ in range(requests)))
        wave.total = time.perf_counter() - started
        for _ in range(200):
            wave.left_in_work = in_work((await client.get("/metrics")).text)
            if not wave.left_in_work:
                break
            await asyncio.sleep(0.05)
    wave.memory_mib, wave.files = server.memory_info().rss / 2**20, server.num_fds()
    return wave


def in_work(page: str) -> float:
    """Responses that the server or its engine has not answered."""
    return sum(
        float(value)
        for value in re.findall(r"^hybridflow_responses_(?:open|in_engines)\{.*\} (\S+)$", page, re.MULTILINE)
    )


def row_of(number: int, wave: Wave) -> str:
    """A line of the table."""
    failed = sum(count for name, count in wave.outcomes.items() if name.startswith("failed"))
    counts = [wave.outcomes[name] for name in ("200", "left", "400", "401")]
    middle, late = statistics.median(wave.seconds), statistics.quantiles(wave.seconds, n=100)[98]
    cells = [
        number,
        *counts,
        failed,
        f"{wave.left_in_work:g}",
        f"{wave.memory_mib:.1f}",
        wave.files,
        f"{wave.total:.1f}",
        f"{middle:.2f}",
        f"{late:.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


def measure(options: argparse.Namespace, folder: Path) -> list[Wave]:
    """A server of its own, and the waves."""
    model = create_tiny_model(folder / "tiny")
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
    if options.cache_mib is not None:
        words += [
            "--gpu-memory-utilization",
            f"{options.cache_mib * 2**20 / free_memory(torch.device('cpu')):.6f}",
        ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1].removesuffix("/v1")
            token = process.stdout.readline().split()[-1]
            waves = []
            for number in range(options.waves):
                waves.append(
                    asyncio.run(run_wave(url, token, options.requests, number, psutil.Process(process.pid)))
                )
                print(row_of(number, waves[-1]), dict(waves[-1].outcomes), flush=True)
        finally:
            process.terminate()
    assert process.returncode == 0, f"the server ended with status {process.returncode}"
    return waves


def main() -> int:
    """Measure, print, write; status 1 where a request failed or something was left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--waves", type=int, default=10)
    parser.add_argument(
        "--cache-mib",
        type=int,
        help="for keys and values (default: the server's, a quarter of the free memory)",
    )
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory() as folder:
        waves = measure(options, Path(folder))
    last = len(waves) // 2
    growth = waves[-1].memory_mib - waves[-1 - last].memory_mib
    facts = {
        "command": f"python benchmarks/serve_load.py --requests {options.requests} --waves {options.waves}"
        + ("" if options.cache_mib is None else f" --cache-mib {options.cache_mib}"),
        "cache": "the server's default, a quarter of the free memory"
        if options.cache_mib is None
        else f"{options.cache_mib} MiB",
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread",
    }
    RESULT.parent.mkdir(exist_ok=True)
    result = {**facts, "memory_growth_mib": growth, "waves": [vars(wave) for wave in waves]}
    RESULT.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
    table = "\n".join(row_of(number, wave) for number, wave in enumerate(waves))
    RESULT.with_suffix(".md").write_text(
        PAGE.format(**facts, **vars(options), table=table, growth=growth, last=last)
    )
    failed = any(name.startswith("failed") for wave in waves for name in wave.outcomes)
    return int(failed or any(wave.left_in_work for wave in waves))


if __name__ == "__main__":
    raise SystemExit(main())
