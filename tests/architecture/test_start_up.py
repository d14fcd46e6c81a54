"""Starting is fast: neither the configuration nor the command's help needs torch.

Counted are the modules that a fresh process has imported, and its CPU time: both are the same on a busy
machine.
"""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

HEAVY = {"torch", "ray", "transformers", "tensordict", "numpy", "pyarrow"}
LOOK = """
import sys, resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, *sys.modules)
"""


class Process(NamedTuple):
    """CPU time and modules of a fresh process at its end."""

    seconds: float
    """Its CPU time."""
    modules: set[str]


def run(code: str) -> Process:
    done = subprocess.run([sys.executable, "-c", code + LOOK], check=True, capture_output=True, text=True)
    seconds, *modules = done.stdout.splitlines()[-1].split()
    return Process(float(seconds), set(modules))


def test_config_imports_without_torch() -> None:
    process = run("import hybridflow.config")
    assert not process.modules & (HEAVY | {"hydra"})
    assert len(process.modules) < 400
    assert process.seconds < 2.0, "usually 0.2"


def test_help_shows_without_torch() -> None:
    process = run(
        "from hybridflow.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
    )
    assert not process.modules & HEAVY
    assert len(process.modules) < 600
    assert process.seconds < 4.0, "usually 0.3"


def test_a_reward_worker_is_light() -> None:
    process = run("import hybridflow.rewards.call, hybridflow.rewards.build")
    assert not process.modules & {"torch", "ray", "transformers"}


def test_algorithms_need_only_torch() -> None:
    """Every file of the maths, not only its first page, and nothing heavy but torch."""
    process = run(
        "import pkgutil\nimport hybridflow.algorithms as room\n"
        "for each in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n    __import__(each.name)\n"
    )
    assert sum(name.startswith("hybridflow.algorithms.") for name in process.modules) > 40, (
        "all were imported"
    )
    assert not process.modules & (HEAVY - {"torch", "numpy"} | {"omegaconf"})
    assert len(process.modules) < 1400, "torch alone brings 1,120"
