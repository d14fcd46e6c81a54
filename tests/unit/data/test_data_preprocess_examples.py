"""The preparation scripts on a small local folder: what they write can be trained on, and what is wrong is
said.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import DataConfig
from hybridflow.data.files import load_rows
from hybridflow.data.prompts import PromptDataset

SCRIPTS = Path(__file__).parents[3] / "examples" / "data_preprocess"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )


def test_gsm8k_from_a_local_folder(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    raw = [
        {"question": "How many?", "answer": "2 + 2\n#### 1,234"},
        {"question": "And?", "answer": "#### -7."},
    ]
    (tmp_path / "raw" / "main").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(
            pa.Table.from_pylist(raw), tmp_path / "raw" / "main" / f"{split}-00000-of-00001.parquet"
        )
    done = run(
        "gsm8k.py", "--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    dataset = PromptDataset(load_rows(str(tmp_path / "out" / "train.parquet")), characters, DataConfig())
    assert [item.row["reward_model"]["ground_truth"] for item in dataset] == ["1234", "-7"]
    assert [item.index for item in dataset] == [0, 1] and dataset[0].row["extra_info"]["split"] == "train"
    assert dataset[0].row["data_source"] == "openai/gsm8k" and "How many?" in characters.decode(
        dataset[0].prompt_token_ids
    )


def test_math_from_a_local_folder(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    solutions = [r"so $\boxed{\frac{1}{2}}$.", r"first \boxed{3}, then $\boxed 5$"]
    for split in ("train", "test"):
        lines = [
            json.dumps({"problem": "Find x.", "solution": solution, "level": "Level 1"})
            for solution in solutions
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    done = run(
        "math_dataset.py", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    dataset = PromptDataset(load_rows(str(tmp_path / "out" / "test.parquet")), characters, DataConfig())
    assert [item.row["reward_model"]["ground_truth"] for item in dataset] == [r"\frac{1}{2}", "5"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no train*.parquet, .jsonl or .json"),
        (
            {"train.jsonl": '{"question": "a"}\n'},
            "row 0 of train has no column 'answer'; its columns: question",
        ),
        (
            {"train.jsonl": '{"question": "a", "answer": "5"}\n'},
            "row 0 of train: no '#### number' in the answer '5'",
        ),
        ({"train.jsonl": "{"}, "train.jsonl, line 1: not JSON"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    done = run("gsm8k.py", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out"))
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr
