"""The version has one home, and every file that repeats it agrees."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import yaml
from sources import ROOT

from hybridflow import __version__


def test_every_file_names_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hybridflow.__version__"}
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(r"^## (.*)$", changelog, re.MULTILINE)
    assert heading is not None
    assert re.fullmatch(rf"{re.escape(__version__)}, (not released|\d{{4}}-\d\d-\d\d)", heading[1]), heading[
        1
    ]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == __version__
    assert citation["license"] == project["project"]["license"]


def test_a_release_is_refused_while_the_tree_is_not_clean(tmp_path: Path) -> None:
    package = tmp_path / "src" / "hybridflow"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "1.2.3"\n')
    script = tmp_path / "scripts" / "release.sh"
    script.parent.mkdir()
    script.write_bytes((ROOT / "scripts" / "release.sh").read_bytes())

    def git(*words: str) -> None:
        author = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "tag.gpgsign=false")
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True, timeout=60)

    def refusal() -> str:
        done = subprocess.run(
            ["bash", str(script)], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
        )
        assert done.returncode == 1 and not (tmp_path / "dist").exists()
        return done.stderr

    git("init", "-q")
    assert "the tree is not clean" in refusal()
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text("# Changelog\n\n## 1.2.3, not released\n")
    git("add", ".")
    git("commit", "-qm", "one")
    assert "'## 1.2.3, not released', wanted '## 1.2.3, YYYY-MM-DD'" in refusal()
    changelog.write_text("# Changelog\n\n## 1.2.3, 2026-01-02\n")
    citation = tmp_path / "CITATION.cff"
    citation.write_text("version: 1.2.2\n")
    git("add", ".")
    git("commit", "-qm", "two")
    assert "CITATION.cff wants the line 'version: 1.2.3'" in refusal()
    citation.write_text("version: 1.2.3\n")
    git("commit", "-qam", "three")
    assert "there is no tag v1.2.3" in refusal()
    git("tag", "-a", "v1.2.3", "-m", "v1.2.3", "HEAD~1")
    assert "the tag v1.2.3 is not on this commit" in refusal()
