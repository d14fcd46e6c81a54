"""Write into the head of each run script in examples/ the hardware and memory that its own keys lead to.

    python scripts/example_heads.py           # writes the lines
    python scripts/example_heads.py --check   # says which are out of date

script ──sh, with a `hybridflow` that prints its words──► keys ──► two lines

A script is run with MODEL (and TEACHER, REWARD_MODEL) set to folders that have only a config.json of
examples/shapes, so neither a model nor a GPU is needed.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from hybridflow.config import RUNS, PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.explain.run import explain_run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SHAPES = EXAMPLES / "shapes"
MODELS = ("MODEL", "TEACHER", "REWARD_MODEL")
DEFAULT = re.compile(r"^(\w+)=\$\{\1:-([^}]*)\}$", re.MULTILINE)
NAME = re.compile(r"_(?P<devices>\d+)x(?P<gigabytes>\d+)gb\.sh$")
FAKE = "#!/bin/sh\nfor word; do printf '%s\\0' \"$word\"; done\n"
"""A `hybridflow` that prints its words, each with a zero byte."""


class Head(NamedTuple):
    """What the keys of a script lead to."""

    devices: int
    nodes: int
    phases: Mapping[str, str]
    """Memory of a device by what is done, as `hybridflow config --explain` prints it."""
    host: str
    """Memory of a process in the CPU, where something is offloaded."""
    served: float = 0.0
    """Share of a device that vLLM or SGLang takes while it generates; 0: the native engine generates."""


def run_scripts() -> list[Path]:
    """Return the scripts of examples/ that train a model."""
    return sorted(path for path in EXAMPLES.glob("*/*.sh") if path.parent.name != "cluster")


def words_of(script: Path, folder: Path) -> list[str]:
    """Return the words that a script gives to `hybridflow`; `folder` is for what stands in for models."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "DATA": str(folder)}
    fake = folder / "hybridflow"
    fake.write_text(FAKE, encoding="utf-8")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    for place in (folder, folder / "rm", folder / "rl"):
        place.mkdir(exist_ok=True)
        for part in ("train", "test"):
            (place / f"{part}.parquet").touch()
    for variable, model in DEFAULT.findall(script.read_text(encoding="utf-8")):
        if variable in MODELS:
            name = model.rpartition("/")[2]
            (folder / name).mkdir(exist_ok=True)
            shape = json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8"))
            (folder / name / "config.json").write_text(json.dumps(shape), encoding="utf-8")
            environment[variable] = str(folder / name)
    done = subprocess.run(
        ["sh", str(script)], env=environment, cwd=EXAMPLES.parent, capture_output=True, text=True, check=True
    )
    return done.stdout.split("\0")[:-1]


def config_of(words: list[str]) -> PPOConfig | SFTConfig:
    """Return the configuration of a command's words, planned for CUDA devices."""
    command, *rest = words
    recipe = None
    if rest[0] == "--recipe":
        _, recipe, *rest = rest
    return prepare_config(RUNS[command], [*rest, "trainer.device=cuda"], recipe=recipe, runs=False).config


def head_of(config: PPOConfig | SFTConfig) -> Head:
    """Return what `hybridflow config --explain` says of a run's devices."""
    lines = {line.label: line.value for line in explain_run(config)}
    phases = {}
    host = ""
    for label, value in lines.items():
        if found := re.fullmatch(r"memory.* while (\w+)", label):
            phases[found[1]] = value
        if label.startswith("CPU memory"):
            host = value
    served = 0.0
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.name in ("vllm", "sglang"):
        served = config.actor_rollout_ref.rollout.gpu_memory_utilization
        del phases["generating"]  # that of the native engine
    trainer = config.trainer
    return Head(trainer.nnodes * trainer.n_gpus_per_node, trainer.nnodes, phases, host, served)


def lines_of(script: Path, head: Head) -> tuple[str, str]:
    """Return the two lines of the head."""
    found = NAME.search(script.name)
    assert found is not None, f"{script.name} should end in _DEVICESxGIGABYTESgb.sh"
    nodes = "one machine" if head.nodes == 1 else f"{head.nodes} machines"
    memory = ", ".join(f"{value} while {phase}" for phase, value in head.phases.items())
    if head.host:
        memory += f", and {head.host} of CPU memory for each"
    if head.served:
        taken = head.served * int(found["gigabytes"])
        memory += f"; the engine takes up to {taken:.0f} GB while generating (rollout.gpu_memory_utilization)"
    hardware = f"{head.devices} GPUs of {found['gigabytes']} GB in {nodes}; not run by us on this hardware."
    if head.devices == 1:
        hardware = hardware.replace("GPUs", "GPU")
    return (
        f"# Hardware: {hardware}",
        f"# Memory of a GPU by `hybridflow config --explain`, without libraries: {memory}.",
    )


def with_head(script: Path) -> str:
    """Return the text of a script with its two lines as they should be."""
    with tempfile.TemporaryDirectory() as folder:
        head = head_of(config_of(words_of(script, Path(folder))))
    hardware, memory = lines_of(script, head)
    text = script.read_text(encoding="utf-8")
    text = re.sub(r"^# Hardware:.*$", lambda _: hardware, text, count=1, flags=re.MULTILINE)
    return re.sub(r"^# Memory.*$", lambda _: memory, text, count=1, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Write or check all heads; 1 if a check found one that is out of date."""
    stale = []
    for script in run_scripts():
        text = with_head(script)
        if text != script.read_text(encoding="utf-8"):
            stale.append(script)
            if "--check" not in arguments:
                script.write_text(text, encoding="utf-8")
    for script in stale:
        print(script.relative_to(EXAMPLES.parent))
    return int("--check" in arguments and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
