"""The machine of a run: results repeat on the same kind of CPU with the same threads and versions."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from hybridflow.distributed.facilities import facilities

MACHINE_FILE = "machine.json"
"""File of the run folder with the facts."""
CPU_INFO = Path("/proc/cpuinfo")


def cpu_model(info: Path = CPU_INFO) -> str:
    """Return the processor's name as its maker writes it, or the architecture where none is given."""
    try:
        for line in info.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def machine_facts(device: str = "cpu") -> dict[str, Any]:
    """Return what results depend on: processor, threads and vector instructions of torch, versions; where
    `device` is an accelerator also the name of the first `card` that this process sees, and how many `cards`.
    """
    import torch

    facts = {
        "cpu": cpu_model(),
        "threads": torch.get_num_threads(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    cards = facilities(device).cards()
    if cards:
        facts |= {"card": cards[0]["name"], "cards": len(cards)}
    return facts
