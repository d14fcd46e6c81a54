"""Processes of a checkout, and digests of what they leave: parts of same_bits.py."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE = 3600
"""Seconds one process may take."""
TIMES = ("timing", "perf/", "seconds", "memory", "cpu")
"""Parts of the names of metrics that depend on the machine's load."""


@dataclass(frozen=True)
class Checkout:
    """A checkout, and a folder for what its processes write, which is made."""

    source: Path
    folder: Path

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its processes; PYTHONPATH wins over an installed package."""
        return {
            **os.environ,
            "PYTHONPATH": str(self.source / "src"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def python(self, words: Sequence[str], name: str, good: tuple[int, ...] = (0,)) -> int:
        """Run Python to its end and return its status; SystemExit with its last lines for one not `good`."""
        path = self.folder / f"{name}.log"
        with path.open("w") as log:
            done = subprocess.run(
                [sys.executable, *words],
                env=self.environment,
                cwd=self.folder,
                stdout=log,
                stderr=log,
                timeout=DEADLINE,
                check=False,
            )
        if done.returncode not in good:
            print(path.read_text()[-4000:], file=sys.stderr)
            raise SystemExit(f"{name} of {self.source} ended with status {done.returncode}")
        return done.returncode

    def command(self, words: Sequence[str], name: str, good: tuple[int, ...] = (0,)) -> int:
        """Run a command of `hybridflow` to its end and return its status."""
        return self.python(["-m", "hybridflow.cli.main", *words], name, good)


def digest_of(value: Any) -> str:
    """Return the digest of a value of JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def tensor_digest(folder: Path, steps: int) -> str:
    """Return the digest of weights and optimizers of the last checkpoint, in the order of files and names.

    What the checkpoint has of the data is left out: a schedule's ledger is there, in the order of events.
    """
    from safetensors.numpy import load_file

    digest = hashlib.sha256()
    found = (folder / f"global_step_{steps}").rglob("*.safetensors")
    files = sorted(path for path in found if path.parent.name != "data")
    if not files:
        raise SystemExit(f"{folder} has no tensors at step {steps}")
    for path in files:
        tensors = load_file(path)
        for key in sorted(tensors):
            digest.update(f"{path.parent.name}/{path.name}/{key}".encode())
            digest.update(tensors[key].tobytes())
    return digest.hexdigest()[:16]


def metric_digest(folder: Path, ignored: tuple[str, ...] = ()) -> str:
    """Return the digest of the metrics of all steps that no clock and no memory of the process decides, but
    for those whose names begin with `ignored`.
    """
    kept = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        kept.append(
            {
                key: values[key]
                for key in sorted(values)
                if not any(part in key for part in TIMES) and not key.startswith(ignored)
            }
        )
    return digest_of(kept)
