"""The tests that need SGLang, run where it is installed, and a page of what came out of each.

    python benchmarks/sglang_conformance.py     (`make test-sglang`)

The conformance suite against a server that it starts, and tests/with_sglang: a killed server, dropped pushes,
three training steps. Some three minutes on 2 free cores, most of it SGLang's imports. Writes
`benchmarks/results/sglang_conformance.md`; status 1 where a test failed.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from pathlib import Path

import torch
from side_by_side import machine

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "benchmarks" / "results" / "sglang_conformance.md"
STUBBED = (
    "**SGLang's own Python engine with its kernel package stubbed** (no CPU build of it is published; "
    "scripts/setup_sglang.sh)"
)
DEADLINE = 2400
TEXT = """# SGLang: what was run, and what came out

{date} · `make test-sglang` ({command}) · {machine}, CPU, float32, one thread · sglang {sglang}, torch
{torch}, transformers {transformers}

{label}. Written by benchmarks/sglang_conformance.py; do not edit.

{passed} passed, {failed} failed, {skipped} skipped. The conformance suite compares greedy tokens of 64
prompts with those of transformers' `generate`, and log-probs with those of its forward pass, within 1e-4.

| test | result | s |
|---|---|---|
{table}
"""


def run(target: str, folder: Path) -> list[tuple[str, str, float]]:
    """(test, result, seconds) of a folder of tests."""
    report = folder / f"{Path(target).name}.xml"
    environment = {"HYBRIDFLOW_CONFORMANCE": "sglang", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        target,
        "-p",
        "no:cacheprovider",
        "--timeout",
        "900",
        f"--junitxml={report}",
    ]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, timeout=DEADLINE, check=False)
    found = []
    for case in xml.parse(report).getroot().iter("testcase"):
        result = "passed"
        for kind in ("failure", "error", "skipped"):
            reason = case.find(kind)
            if reason is not None:
                said = str(reason.get("message")).splitlines()[0].replace("|", "/")
                result = f"skipped: {said}" if kind == "skipped" else f"FAILED: {said[:200]}"
        place = str(case.get("classname")).replace(".", "/")
        found.append((f"{place}.py::{case.get('name')}", result, float(case.get("time", "0"))))
    return found


def label() -> str:
    """Return which kind of SGLang this is."""
    import sgl_kernel

    return (
        f"This is {STUBBED}"
        if sgl_kernel.__version__ == "0"
        else f"With SGLang's own kernels, {sgl_kernel.__version__}"
    )


def main() -> int:
    """Run, write, print."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            row for target in ("tests/conformance", "tests/with_sglang") for row in run(target, Path(folder))
        ]
    counts = {
        kind: sum(result.startswith(kind) for _, result, _ in rows)
        for kind in ("passed", "FAILED", "skipped")
    }
    PAGE.write_text(
        TEXT.format(
            date=datetime.date.today().isoformat(),
            command="python benchmarks/sglang_conformance.py",
            machine=machine(),
            sglang=importlib.metadata.version("sglang"),
            torch=torch.__version__,
            transformers=importlib.metadata.version("transformers"),
            label=label(),
            passed=counts["passed"],
            failed=counts["FAILED"],
            skipped=counts["skipped"],
            table="\n".join(f"| `{name}` | {result} | {seconds:.1f} |" for name, result, seconds in rows),
        ),
        encoding="utf-8",
    )
    print(PAGE.read_text(encoding="utf-8"))
    return int(counts["FAILED"] > 0 or counts["passed"] == 0)


if __name__ == "__main__":
    raise SystemExit(main())
