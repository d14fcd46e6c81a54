"""The notebooks of the examples run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))
CELL_SECONDS = 1800
"""A limit for a cell that hangs; each takes a minute at most on a quiet machine."""


def test_there_are_four() -> None:
    assert [notebook.stem for notebook in NOTEBOOKS] == [
        "environment",
        "grpo_on_a_laptop",
        "own_reward",
        "reading_a_run",
    ]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_it_is_kept_without_outputs(notebook: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    for cell in content.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_it_runs_from_top_to_bottom(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    content = nbformat.read(notebook, as_version=4)
    client = nbclient.NotebookClient(
        content, timeout=CELL_SECONDS, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises the error of a cell that fails
    outputs = [output for cell in content.cells if cell.cell_type == "code" for output in cell.outputs]
    views = [output for output in outputs if "<progress" in str(output.get("data", {}).get("text/html", ""))]
    assert views, "a run in a notebook shows a bar and a table"
    nbformat.write(content, tmp_path / notebook.name)
    first, last = scores_of(tmp_path)
    assert last > first, (
        f"the run of {notebook.stem} has learned nothing: {first:.2f} at first, {last:.2f} at last"
    )


def scores_of(folder: Path) -> tuple[float, float]:
    """Return the mean scores of the first and the last third of the steps of reinforcement learning."""
    (metrics,) = [file for name in ("rl", "run") for file in folder.glob(f"runs/*/{name}/metrics.jsonl")]
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    third = max(1, len(scores) // 3)
    return sum(scores[:third]) / third, sum(scores[-third:]) / third
