"""The run scripts of examples/: their keys make a run, and their heads say what these keys lead to."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HEADS = runpy.run_path(str(ROOT / "scripts" / "example_heads.py"))
SCRIPTS = HEADS["run_scripts"]()
README = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
GIB = 2**30
ROOM = 0.9
"""Share of a device that the estimate may take: libraries and fragments take the rest."""
FAST = "smollm2-360m_gsm8k_1x24gb.sh"


def name(script: Path) -> str:
    return str(script.relative_to(ROOT / "examples"))


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(each, marks=[] if each.name == FAST else pytest.mark.slow, id=name(each))
        for each in SCRIPTS
    ],
)
def test_a_head_is_what_the_keys_lead_to_and_fits_the_hardware_in_the_name(
    script: Path, tmp_path: Path
) -> None:
    head = HEADS["head_of"](HEADS["config_of"](HEADS["words_of"](script, tmp_path)))
    text = script.read_text(encoding="utf-8")
    for line in HEADS["lines_of"](script, head):
        assert line in text.splitlines(), "run python scripts/example_heads.py"
    found = re.search(r"_(\d+)x(\d+)gb\.sh$", script.name)
    assert found is not None and head.devices == int(found[1])
    for phase, value in head.phases.items():
        number, unit = value.split()
        size = float(number) * {"GiB": GIB, "MiB": 2**20}[unit]
        assert size < ROOM * int(found[2]) * 1e9, phase


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_is_listed_with_its_own_sentence_and_prepares_its_data(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").splitlines()
    assert f"| [{name(script)}]({name(script)}) | {lines[1][2:]} |" in README
    prepared = re.search(r"^# Data: python (\S+)", "\n".join(lines), re.MULTILINE)
    assert prepared is not None and (ROOT / prepared[1]).is_file()
    for path in re.findall(r"\bexamples/\S+\.(?:py|yaml)\b", "\n".join(lines)):
        assert (ROOT / path).is_file(), path
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_every_way_of_preparing_data_is_listed() -> None:
    scripts = {path.name for path in (ROOT / "examples" / "data_preprocess").glob("*.py")} - {"rows.py"}
    assert scripts == set(re.findall(r"\(data_preprocess/(\w+\.py)\)", README))
