"""CPU seconds until the message of a common mistake, and whether torch was imported on the way.

    python benchmarks/mistakes.py        # writes benchmarks/results/mistakes.md

Each mistake is a command of its own in a fresh process, run three times; the least CPU time counts, user and
system, of the process and its children. The data, the model folder and the reward are right but for the one
mistake. The model folder needs no real weights: no mistake here is one for which a model must be read.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GOAL = 1.5
RUNS = 3
TARGET = Path(__file__).resolve().parent / "results" / "mistakes.md"
PROBE = (
    "import sys, runpy\nsys.argv = ['main_ppo', *sys.argv[1:]]\nstatus = 1\ntry:\n    "
    "runpy.run_module('hybridflow.trainer.main_ppo', run_name='__main__')\nexcept SystemExit as end:\n    "
    "status = end.code\nsys.stderr.write(f\"\\nprobe {status} {'torch' in sys.modules}\\n\")\n"
)


@dataclass(frozen=True)
class Mistake:
    """One thing done wrong: what is changed in the folder of a right run, and the overrides that then
    differ.
    """

    name: str
    spoil: Callable[[Path], list[str]]


def removed(name: str, file: str) -> Mistake:
    """Return the mistake of a model folder that lacks a file."""

    def spoil(folder: Path) -> list[str]:
        (folder / "model" / file).unlink()
        return []

    return Mistake(name, spoil)


def keys(name: str, *overrides: str) -> Mistake:
    """Return the mistake of wrong keys; {folder} is the folder of the run."""
    return Mistake(name, lambda folder: [word.replace("{folder}", str(folder)) for word in overrides])


def wrong_columns(folder: Path) -> list[str]:
    rows = [{"question": row["prompt"], "data_source": row["data_source"]} for row in right_rows()]
    return [f"data.train_files={write_rows(folder / 'columns.jsonl', rows)}"]


def unknown_source(folder: Path) -> list[str]:
    rows = [row | {"data_source": "my/own_questions"} for row in right_rows()]
    return [f"data.train_files={write_rows(folder / 'source.jsonl', rows)}"]


def no_folder_to_write(folder: Path) -> list[str]:
    (folder / "taken").write_text("")
    return [f"trainer.default_local_dir={folder / 'taken' / 'run'}"]


MISTAKES = (
    keys("a key that does not exist", "data.train_batchsize=4"),
    keys("a data file that is not there", "data.train_files={folder}/none.parquet"),
    keys("a model folder that is not there", "actor_rollout_ref.model.path={folder}/none"),
    removed("a model folder without config.json", "config.json"),
    removed("a model folder without a tokenizer", "tokenizer.json"),
    removed("messages, and a tokenizer without a chat template", "chat_template.jinja"),
    Mistake("data without the column of prompts", wrong_columns),
    Mistake("a data_source that reward.function=auto does not know", unknown_source),
    Mistake("a run folder that cannot be written", no_folder_to_write),
    keys("a tracker whose package is not installed", "trainer.logger=[console,swanlab]"),
)


def right_rows() -> list[dict[str, object]]:
    """Return rows as verl's preparation of GSM8K writes them."""
    return [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"What is {number} + 1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"index": number},
        }
        for number in range(8)
    ]


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    """Write rows as JSON lines and return the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def right_run(folder: Path) -> list[str]:
    """Write what a run reads, as far as it is looked at before a model is loaded, and return its
    overrides.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (model / name).write_text("")
    return [
        f"data.train_files={write_rows(folder / 'train.jsonl', right_rows())}",
        "data.train_batch_size=4",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "algorithm.adv_estimator=grpo",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={folder / 'run'}",
    ]


@dataclass(frozen=True)
class Seen:
    """How one command ended."""

    seconds: float
    torch: bool
    message: str


def run_once(mistake: Mistake) -> Seen:
    """Make the mistake in a new folder, run the command, and measure its CPU time."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        right = right_run(folder)
        words = [*right, *mistake.spoil(folder)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        ended = subprocess.run(
            [sys.executable, "-c", PROBE, *words],
            capture_output=True,
            text=True,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        written = ended.stderr.replace(str(folder), "FOLDER")
    *_, status, torch = written.rstrip().rpartition("\n")[2].split()
    if status != "1":
        raise SystemExit(f"{mistake.name}: ended with status {status}, wanted 1:\n{written}")
    errors = [line for line in written.splitlines() if "Error: " in line]
    return Seen(seconds, torch == "True", errors[0] if errors else written.splitlines()[0])


def table(seen: dict[str, Seen]) -> str:
    """Return the page: one row for each mistake, and the bar at its end."""
    lines = [
        "# Seconds until the message of ten common mistakes",
        "",
        f"Written by `benchmarks/mistakes.py`. CPU seconds, user and system, the least of {RUNS} runs of a "
        f"fresh process of `python -m hybridflow.trainer.main_ppo` on {cpu_model()}, Python "
        f"{platform.python_version()}. The columns are the mistake, the seconds, whether torch was imported "
        "before the message, and the message.",
        "",
        "| mistake | CPU s | torch | message |",
        "| --- | ---: | --- | --- |",
    ]
    for name, one in seen.items():
        message = one.message.replace("|", "\\|")
        lines.append(f"| {name} | {one.seconds:.2f} | {'yes' if one.torch else 'no'} | {message[:240]} |")
    missed = [name for name, one in seen.items() if one.torch or one.seconds > GOAL]
    lines += ["", f"Goal: at most {GOAL} CPU seconds each, without torch. " + verdict(missed)]
    return "\n".join(lines) + "\n"


def verdict(missed: list[str]) -> str:
    """Return the sentence that says whether the goal is met."""
    return f"Missed by: {'; '.join(missed)}." if missed else "It is met by all of them."


def cpu_model() -> str:
    """Return the name of this machine's CPU, as Linux has it."""
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


def main() -> None:
    """Measure all mistakes and write the table."""
    seen = {}
    for mistake in MISTAKES:
        seen[mistake.name] = min((run_once(mistake) for _ in range(RUNS)), key=lambda one: one.seconds)
        print(f"{seen[mistake.name].seconds:6.2f} s  torch {seen[mistake.name].torch!s:5}  {mistake.name}")
    TARGET.write_text(table(seen))


if __name__ == "__main__":
    main()
