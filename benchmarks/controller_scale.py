"""The controller of a step at 1 to 4,096 workers, simulated with a clock instead of a network.

    python benchmarks/controller_scale.py [--steps 3]        (two minutes of one core)

The calls of a GRPO step go through the driver's own code: dispatch, dealing, encoding, collecting. Ranks
answer at once. The clock adds what a network and Ray would: the time of a message that
`controller_overhead.py` has measured, and the bytes over the driver's link. Writes
`benchmarks/results/controller_scale.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
from typing import Any, NamedTuple

import torch
from controller_overhead import PROMPTS_A_RANK, RESULT, simulate
from controller_workers import MINI_BATCHES, RESPONSES
from side_by_side import machine

PAGE_FILE = RESULT.with_name("controller_scale.md")
RANKS = (1, 8, 64, 256, 1024, 2048, 4096)
SIMULATED_WIDTH = 64
"""Tokens of a simulated row."""
WIDTH = 4096
"""Tokens of a row that the page speaks of; bytes grow with it, the driver's objects do not."""
LINK = 12.5e9
"""Bytes a second of the driver's link: 100 Gb/s."""
STEP = 60.0
"""Seconds of a short step of large models, of which the controller may take a tenth."""
PAGE = """# The controller at 1 to 4,096 workers

{date} · `{command}` · {machine}

Written by benchmarks/controller_scale.py; do not edit. A GRPO step makes 1 generate, 2 log-probs and
{mini_batches} mini-batches of an update, for {rows_a_rank} rows a worker. The driver's work is its own
code, run here for so many ranks that answer at once; its CPU seconds are measured. The clock adds
{message_ms:.2f} ms a message ([measured on Ray](controller_overhead.md), an upper bound) and bytes of
rows of {width:,} tokens over a link of 100 Gb/s. Tokens are sent once a step, by collectors or the row
store, as a run does ([ARCHITECTURE](../../ARCHITECTURE.md#the-controller)); "all by value" is what a
driver would send without them.

| workers | rows | messages | own work | and messages | GB once | GB by value | clock | of {step:.0f} s |
|---|---|---|---|---|---|---|---|---|
{table}

## What breaks first

{breaks}
"""


class Clock(NamedTuple):
    """The seconds that a step of so many workers costs the driver."""

    row: dict[str, Any]
    messages: float
    once: float
    by_value: float

    @property
    def own(self) -> float:
        """Seconds of the driver's own work."""
        return float(self.row["driver_s"]["median"])

    @property
    def total(self) -> float:
        """Seconds of all, one after another in the driver's one thread."""
        return self.own + self.messages + self.once / LINK


def clock(row: dict[str, Any], message_s: float) -> Clock:
    """Return the clock of a simulated step."""
    by_value = (row["sent_bytes"] + row["received_bytes"]) * WIDTH / SIMULATED_WIDTH
    tokens = row["rows"] * WIDTH * (8 + 1)  # ids and a mask
    return Clock(row, row["messages"] * message_s, float(tokens), by_value)


def line(found: Clock) -> str:
    """Return a line of the table."""
    row = found.row
    cells = [f"{row['ranks']:,}", f"{row['rows']:,}", f"{row['messages']:,}", f"{found.own:.2f} s"]
    cells += [
        f"{found.own + found.messages:.2f} s",
        f"{found.once / 1e9:.2f} GB",
        f"{found.by_value / 1e9:.1f} GB",
    ]
    cells += [f"{found.total:.2f} s", f"{found.total / STEP:.1%}"]
    return f"| {' | '.join(cells)} |"


def breaks(clocks: list[Clock]) -> str:
    """Say what limits the cluster first, by the figures of this run."""
    most = clocks[-1]
    parts = {
        "messages of Ray": most.messages,
        "the driver's own dealing, packing and joining": most.own,
        "bytes through the driver's link": most.once / LINK,
    }
    order = sorted(parts, key=lambda name: -parts[name])
    shown = ", then ".join(f"{name} ({parts[name]:.1f} s)" for name in order)
    over = [each.row["ranks"] for each in clocks if each.total > STEP / 10]
    limit = f"A tenth of a step of {STEP:.0f} s is passed at {over[0]:,} workers." if over else ""
    if not limit:
        limit = f"A tenth of a step of {STEP:.0f} s is not passed."
    sent = most.by_value / LINK
    return f"""At {most.row["ranks"]:,} workers, in order: {shown}. {limit}

The first two grow with workers × calls. One packet for a node, which deals to its 8 devices, instead of
one for each of them would take the messages from {most.messages:.1f} to {most.messages / 8:.1f} s, and
the packing with them. Bytes do not break first: all columns by value would be {most.by_value / 1e9:.0f}
GB, {sent:.1f} s of the link, and eight times that with rows of {8 * WIDTH:,} tokens."""


def main() -> int:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=3, help="steps of each median")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    message_s = json.loads(RESULT.with_suffix(".json").read_text())["ray_message_s"]
    clocks = []
    for ranks in RANKS:
        clocks.append(clock(simulate(ranks, arguments.steps), message_s))
        print(line(clocks[-1]), flush=True)
    PAGE_FILE.write_text(
        PAGE.format(
            date=datetime.date.today().isoformat(),
            command=f"python benchmarks/controller_scale.py --steps {arguments.steps}",
            machine=f"{machine()}, torch {torch.__version__}, one thread",
            mini_batches=MINI_BATCHES,
            rows_a_rank=PROMPTS_A_RANK * RESPONSES,
            message_ms=1e3 * message_s,
            width=WIDTH,
            step=STEP,
            table="\n".join(map(line, clocks)),
            breaks=breaks(clocks),
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
