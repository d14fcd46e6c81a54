"""Rows of plugins: entry points of installed distributions, as a process finds them, and broken ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROW = """
from hybridflow.distributed.accelerators import Accelerator
from hybridflow.distributed.facilities import Facilities

class Own(Facilities):
    def card_name(self):
        return "Toy 9000"

TOY = Accelerator(
    "toy", "toy", "TOY", "gloo", facilities="toy_row:Own", profilers=("torch_memory",), package="toy_row"
)
MORE = [Accelerator("toy2", "second toy", "TOY2", "gloo"), Accelerator("toy3", "third toy", "GPU", "gloo")]
TAKEN = Accelerator("npu", "NPU", "NPU", "gloo")
OTHER = {"device": "toy"}
"""


def install(folder: Path, name: str, entries: str, code: str = ROW) -> None:
    """Write a distribution with entry points, as an installer leaves it in a folder of sys.path."""
    facts = folder / f"{name}-1.5.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
    (facts / "entry_points.txt").write_text(f"[hybridflow.accelerators]\n{entries}\n")
    (folder / "toy_row.py").write_text(code)


def said(folder: Path, code: str) -> list[str]:
    """Run `code` in a process that finds the distributions of `folder`, and return the lines it printed."""
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


TELL = """
from hybridflow.errors import ConfigError
def tell(action):
    try:
        print(action())
    except ConfigError as error:
        print("refused:", error)
"""


def test_a_plugins_rows_are_in_the_table(tmp_path: Path) -> None:
    install(tmp_path, "hybridflow-toy", "toy = toy_row:TOY\nmore = toy_row:MORE")
    lines = said(
        tmp_path,
        TELL
        + """
import sys
from hybridflow.distributed.accelerators import accelerators, features, is_accelerator, no_accelerator
assert features("cuda").backend == "nccl" and "toy_row" not in sys.modules, "not before it is needed"
print(no_accelerator())
assert "toy_row" not in sys.modules and "torch" not in sys.modules
print(*accelerators())
print(features("toy").resource, is_accelerator("toy3"), is_accelerator("meta"), "torch" in sys.modules)
from hybridflow.config import SFTConfig
from hybridflow.config.load import load_config
for name in ("toy2", "tpu", "toi"):
    tell(lambda: load_config(SFTConfig, [f"trainer.device={name}"]).config.trainer.device)
from hybridflow.distributed.facilities import facilities
print(facilities("toy").card_name(), facilities("toy2").card_name())
from hybridflow.controller.ray.cluster import _takes
from hybridflow.controller.ray.preflight import device_of
from hybridflow.distributed.device import num_devices
print(_takes("toy"), _takes("toy3"), _takes("cpu"), _takes("npu"))
print(device_of([{"Alive": True, "Resources": {"CPU": 4.0, "TOY2": 1.0}}], num_devices))
from hybridflow.distributed.device import resolve_device
tell(lambda: resolve_device("toy"))
from hybridflow.rollout.server.build import served_device
for name in ("cpu", "toy:0", "cuda:x", "gpu:1"):
    tell(lambda: served_device(name))
""",
    )
    known = "'auto', 'cpu', 'cuda', 'npu', 'toy2', 'toy3', 'toy'"
    absent = "refused: trainer.device=toy, but no such device is usable here"
    wanted = [
        "None",
        "cpu cuda npu toy2 toy3 toy",
        "TOY True False False",
        "toy2",
        f"refused: trainer.device: got 'tpu' (str), wanted one of {known} (did you mean 'npu'?)",
        f"refused: trainer.device: got 'toi' (str), wanted one of {known} (did you mean 'toy'?)",
        "Toy 9000 None",
        "{'num_cpus': 0, 'num_gpus': 0, 'resources': {'TOY': 1}} {'num_cpus': 0, 'num_gpus': 1} "
        "{'num_cpus': 1, 'num_gpus': 0} {'num_cpus': 0, 'num_gpus': 0, 'resources': {'NPU': 1}}",
        "toy2",
        absent,
        "cpu",
        absent.replace("trainer.device", "--device"),
        "refused: --device cuda:x: give a device and perhaps its number, for example cuda:1",
        f"refused: --device: got 'gpu' (str), wanted one of {known} (did you mean 'npu'?)",
    ]
    assert [line.partition(" (torch ")[0] for line in lines] == wanted


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        (
            "toy = no_such_module:TOY",
            "cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')",
        ),
        (
            "toy = toy_row:ABSENT",
            "cannot be loaded (AttributeError: module 'toy_row' has no attribute 'ABSENT')",
        ),
        (
            "toy = toy_row:OTHER",
            "holds {'device': 'toy'} where an Accelerator or a sequence of them is wanted",
        ),
        ("toy = toy_row:TAKEN", "adds a device 'npu' (entry point toy of hybridflow.accelerators), which "),
        ("toy = toy_row:TOY\nagain = toy_row:TOY", "adds a device 'toy' (entry point toy of"),
    ],
)
def test_a_broken_plugin_is_told_by_its_distribution(tmp_path: Path, entries: str, problem: str) -> None:
    """It is told where it is needed, which is neither on import nor for a device of the table itself."""
    install(tmp_path, "hybridflow-broken", entries)
    fine, table, refused = said(
        tmp_path,
        TELL
        + """
from hybridflow.config import SFTConfig
from hybridflow.config.load import load_config
from hybridflow.distributed.accelerators import accelerators
tell(lambda: load_config(SFTConfig, ["trainer.device=cpu"]).config.trainer.device)
tell(accelerators)
tell(lambda: load_config(SFTConfig, ["trainer.device=toy5"]))
""",
    )
    assert fine == "cpu"
    for line in (table, refused):
        assert line.startswith("refused: ") and "hybridflow-broken 1.5" in line and problem in line


def test_facilities_that_a_row_names_wrongly_are_told(tmp_path: Path) -> None:
    code = ROW + (
        'WRONG = [Accelerator("toy5", "toy", "TOY", "gloo", facilities="toy_row:Nothing"),\n'
        '    Accelerator("toy6", "toy", "TOY", "gloo", facilities="toy_row:Accelerator"),\n'
        '    Accelerator("toy7", "toy", "TOY", "gloo", facilities="nowhere")]\n'
    )
    install(tmp_path, "hybridflow-toy", "toy = toy_row:WRONG", code)
    absent, other, no_class = said(
        tmp_path,
        TELL
        + """
from hybridflow.distributed.facilities import facilities
for name in ("toy5", "toy6", "toy7"):
    tell(lambda: facilities(name))
""",
    )
    assert "the row of toy5" in absent and "facilities='toy_row:Nothing', which cannot be imported" in absent
    assert "is no subclass of hybridflow.distributed.facilities.Facilities" in other
    assert "write module:Class" in no_class
