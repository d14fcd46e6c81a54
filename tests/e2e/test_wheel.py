"""What is shipped: the wheel has the whole package and nothing else, and works from where it is unpacked."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

from hybridflow import __version__

ROOT = Path(__file__).parents[2]
ENTRIES = (
    "src",
    "README.md",
    "LICENSE",
    "MANIFEST.in",
    "pyproject.toml",
    "setup.py",
    "tests",
    "docs",
    "examples",
)
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # the first of the two changes sys.argv
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions in one folder, built from a copy, because setuptools writes beside the source."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ENTRIES:
        if (ROOT / name).is_file():
            shutil.copy2(ROOT / name, tree / name)
        else:
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, tree / name, ignore=unwanted)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-c", BUILD, str(out)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True, timeout=600)
    return out


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel.read(name).decode())


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "hybridflow").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    there = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert there == wanted
    assert {
        "hybridflow/py.typed",
        "hybridflow/recipes/grpo.yaml",
        "hybridflow/observability/report/assets/page.html",
    } <= there
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in wheel.namelist())


def test_the_metadata_says_what_an_index_shows(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Version"] == __version__
    assert metadata["Author"] == "The hybridflow developers"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert isinstance(page, str) and "hybridflow demo" in page
    links = re.findall(r"\]\(([^)]*)\)", page)
    assert not [link for link in links if ":" not in link], "an index has no files that these could lead to"


def test_the_source_distribution_has_what_its_tests_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for wanted in (
        "setup.py",
        "MANIFEST.in",
        "tests/conftest.py",
        "docs/README.md",
        "examples/own_algorithm/my_algorithm.py",
    ):
        assert wanted in names
    assert not [name for name in names if name.endswith(".pyc")]


def test_the_unpacked_wheel_is_imported_and_knows_its_recipes(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    code = (
        "import sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import hybridflow\n"
        "from hybridflow.cli.main import main\n"
        "assert hybridflow.__file__.startswith(sys.argv[1]), hybridflow.__file__\n"
        "sys.exit(main(['explain', '--recipe', 'dapo']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "dapo" in done.stdout.lower() or "grpo" in done.stdout.lower()
