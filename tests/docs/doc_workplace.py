"""A folder in which the commands of the documents find what they name: a model, data, a finished run.

    stock (made once) ──copy──► the working folder of a page: MODEL, train.jsonl, my-model, RUN, …

Names of pages are real paths there, so that blocks run as they are printed.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from doc_blocks import ROOT, Block, pages, read_blocks
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from hybridflow.cli.main import main as hybridflow
from hybridflow.models.tiny import create_tiny_model

BASH = shutil.which("bash") or "bash"
HUB_NAME = "Qwen/Qwen2.5-0.5B-Instruct"
FINISHED = 40
"""Steps of the finished run, of which every tenth is saved."""
REWARD = '''"""The share of characters that are digits."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))


def politeness(data_source, solution_str, ground_truth, extra_info=None):
    return float("please" in solution_str)
'''
SHARED = ("examples", "src", "scripts", "tests", "Makefile", "pyproject.toml")
"""What commands read of a checkout."""


def questions(number: int) -> list[dict[str, Any]]:
    """Rows for reinforcement learning."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{index} + 1 = ?"}],
            "reward_model": {"style": "rule", "ground_truth": str(index + 1)},
            "extra_info": {"index": index, "level": 1, "split": "train"},
        }
        for index in range(number)
    ]


def pairs(number: int) -> list[dict[str, Any]]:
    """Rows for preference losses and reward models."""
    return [
        {"prompt": f"{index} + 1 = ?", "chosen": str(index + 1), "rejected": str(index + 2)}
        for index in range(number)
    ]


def chats(number: int) -> list[dict[str, Any]]:
    """Rows for supervised fine-tuning."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"{index} + 1 = ?"},
                {"role": "assistant", "content": str(index + 1)},
            ]
        }
        for index in range(number)
    ]


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows in the format that the name of the file asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_stock(folder: Path) -> None:
    """Make everything that is slow to make."""
    folder.mkdir(parents=True)
    model = create_tiny_model(folder / "MODEL", hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)
    _write_reward_model(model, folder / "RM")
    for name in ("train.jsonl", "questions.jsonl", "train.parquet", "my_data.jsonl"):
        write_rows(folder / name, questions(16))
    for name in ("test.parquet", "val.jsonl", "test.jsonl", "prompts.parquet"):
        write_rows(folder / name, questions(4))
    for place in ("gsm8k", "math"):
        write_rows(folder / f"data/{place}/train.parquet", questions(16))
        write_rows(folder / f"data/{place}/test.parquet", questions(4))
    write_rows(folder / "chats.jsonl", chats(16))
    write_rows(folder / "pairs.jsonl", pairs(16))
    for name in ("train", "test"):
        write_rows(folder / f"rm/{name}.parquet", pairs(16))
    for name in ("my_reward.py", "my_rewards.py", "reward.py"):
        (folder / name).write_text(REWARD)
    run = folder / "checkpoints/hybridflow/first"
    words = [
        "data.train_batch_size=4",
        "data.max_response_length=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    ]
    words += [f"data.train_files={folder / 'train.jsonl'}", f"data.val_files={folder / 'test.parquet'}"]
    words += [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "reward.num_workers=0",
    ]
    words += [f"trainer.default_local_dir={run}", "trainer.save_freq=10", "trainer.val_before_train=false"]
    words += ["trainer.total_epochs=10", f"trainer.total_training_steps={FINISHED}", "trainer.num_threads=1"]
    words.append("trainer.logger=[]")
    assert hybridflow(["train", "--recipe", "grpo", *words]) == 0
    assert hybridflow(["merge", str(run / f"global_step_{FINISHED}"), str(folder / "my-model")]) == 0


def _write_reward_model(model: Path, folder: Path) -> None:
    config = AutoConfig.from_pretrained(model, num_labels=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(model).save_pretrained(folder)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of commands whose home is `folder`."""
    return os.environ | {
        "PATH": f"{folder / '.programs'}:{os.environ['PATH']}",
        "HOME": str(folder),
        "PYTHONPATH": f"{ROOT / 'src'}:{Path(__file__).parent}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def write_workplace(stock: Path, folder: Path, address: str) -> Path:
    """Make the working folder of a page, whose commands are run by the zygote at `address`."""
    shutil.copytree(stock, folder)
    for name in SHARED:
        (folder / name).symlink_to(ROOT / name)
    for name in (HUB_NAME, "demo/sft/model", "DEMO/sft/model", "JUDGE"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(folder / "MODEL")
    for block in (block for page in pages() for block in read_blocks(page)):
        if block.file and block.language == "python":  # a page may use a file that another one shows
            write_file(block, folder)
    (folder / "RUN").symlink_to(folder / "checkpoints/hybridflow/first")
    programs = folder / ".programs"
    programs.mkdir()
    zygote = Path(__file__).with_name("doc_zygote.py")
    starts = {name: f"-SE {zygote} {address} {name}" for name in ("hybridflow", "python")} | {
        "own-python": ""
    }
    for name, what in starts.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return folder


def write_file(block: Block, folder: Path) -> None:
    """Write a block into the file that it is."""
    (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
    (folder / block.file).write_text(block.text)


END_JOBS = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"
"""Bash that ends what a block has left in the background, which would keep its output open."""


def run_bash(text: str, folder: Path, *, timeout: float = 1000) -> subprocess.CompletedProcess[str]:
    """Run a block as a shell would; a time limit ends one that hangs."""
    return subprocess.run(
        [BASH, "-c", f"set -eu -o pipefail\n{END_JOBS}\n{text}"],
        cwd=folder,
        env=environment(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


RECORD = """
record() { printf '%s\\0' "$@" $'\\x1e' >> "$CALLS"; }  # one write: jobs in the background write there too
hybridflow() { record hybridflow "$@"; }
python() { record python "$@"; }
ray() { while [ $# -gt 0 ] && [ "$1" != -- ]; do shift; done; if [ $# -gt 0 ]; then shift; "$@"; fi; }
sbatch() { record hybridflow train "${@:2}"; }
cd() { :; }; kill() { :; }; wait() { :; }; exec() { :; }; source() { :; }
function . { :; }
command_not_found_handle() { case "$1" in */hybridflow|*/python) record "${1##*/}" "${@:2}";; esac; }
"""
"""Bash in which commands of ours are written down, and all others do nothing."""


def recorded(text: str, folder: Path) -> list[list[str]]:
    """Return the commands of ours that a block would run, each with its words as bash expands them."""
    folder.mkdir(parents=True, exist_ok=True)
    checked = subprocess.run([BASH, "-n", "-c", text], capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
    calls = folder / "calls"
    calls.write_text("")
    text = text.replace(".venv-vllm/bin/", "").replace(".venv/bin/", "")
    subprocess.run(
        [BASH, "-c", RECORD + text],
        cwd=folder,
        env={"PATH": "/nowhere", "CALLS": str(calls), "HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
    )
    found = calls.read_text().split("\0\x1e\0")
    return [call.split("\0") for call in found if call]
