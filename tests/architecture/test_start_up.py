"""Starting is fast: the configuration needs no torch, the command's help neither."""

from __future__ import annotations

import subprocess
import sys
import time


def run(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return time.perf_counter() - start


def test_config_imports_without_torch() -> None:
    code = (
        "import sys, hybridflow.config; assert not {'torch', 'ray', 'hydra', 'transformers'} & "
        "set(sys.modules)"
    )
    assert min(run(code) for _ in range(3)) < 0.5


def test_help_shows_without_torch() -> None:
    code = (
        "import sys\nfrom hybridflow.cli.main import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert min(run(code) for _ in range(3)) < 1.0


def test_algorithms_need_only_torch() -> None:
    """Own time after torch, best of three: every file of the maths, not only its first page."""
    code = (
        "import pkgutil, sys, time\nimport torch\nstart = time.perf_counter()\nimport hybridflow.algorithms "
        "as room\n"
        "for each in pkgutil.walk_packages(room.__path__, room.__name__ + '.'):\n    __import__(each.name)\n"
        "print(time.perf_counter() - start)\nassert not {'tensordict', 'transformers', 'ray', 'omegaconf'} "
        "& set(sys.modules)"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        for _ in range(3)
    ]
    assert min(map(float, outputs)) < 0.3
