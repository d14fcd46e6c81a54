"""From the command to the first optimizer step: `hybridflow train` with the local controller against a script
with TRL's `GRPOTrainer`, and alone with a real model.

    python benchmarks/start.py [--threads 1,2] [--rounds 5] [--real FOLDER] [--quick]

Needs the extra `bench`.
A model of 0.4 M parameters in a folder, 8 prompts × 4 responses of at most 16 tokens, the same reward
function in the process itself. The clock starts before the process and stops when the metrics of its first
step are told. Both in turn, each time a new process. With `--real`, the folder of a real model such as
SmolLM2-135M, the clock of our side also stops where the first step begins: the end, less what the step itself
says that it took. Writes `benchmarks/results/start.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import side_by_side as kit
from letters_reward import reward

PROMPTS = 8
GROUP = 4
TOKENS = 16
REAL_BEGINS = 10
"""Seconds within which the first step of the real model is to begin on a quiet machine."""
REAL_HEAD = ("threads", "s to the step", "s to its end", "CPU s")
HEAD = ("threads", "side", "s to the first step", "CPU s", "against TRL")


def run_trl(folder: Path) -> None:
    """Run the program of a TRL user, up to its first step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Tells(TrainerCallback):  # type: ignore[misc]
        """Tells that a step has ended."""

        def on_log(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            kit.say({"step": state.global_step})

    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=TOKENS,
            max_steps=1,
            save_strategy="no",
            report_to="none",
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[Tells()],
    ).train()


def our_command(folder: Path, model: Path) -> list[str]:
    """The command line of our side."""
    keys = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.use_kl_loss": "false",
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS,
        "actor_rollout_ref.rollout.n": GROUP,
        "data.train_files": folder / "prompts.jsonl",
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 2 * kit.PROMPT,
        "data.max_response_length": TOKENS,
        "reward.custom_reward_function.path": Path(__file__).with_name("letters_reward.py"),
        "reward.num_workers": 0,
        "trainer.default_local_dir": folder / "ours",
        "trainer.controller": "local",
        "trainer.device": "cpu",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": 1,
    }
    program = Path(sys.executable).with_name("hybridflow")
    return [str(program), "train", "--recipe", "grpo", *(f"{key}={value}" for key, value in keys.items())]


def timed(command: list[str], threads: int, metrics: Path | None) -> tuple[float, float]:
    """Seconds until the first step is told, on standard output or by a line in the file `metrics`; and CPU
    seconds in all.
    """
    before = os.times()
    began = time.perf_counter()
    told = 0.0
    with tempfile.TemporaryFile("w+") as errors:
        environment = kit.environment(threads)
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has compiled modules
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        if metrics is None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(kit.MARK) and not told:
                    told = time.perf_counter() - began
        while metrics is not None and process.poll() is None and not told:
            if metrics.is_file() and metrics.stat().st_size:
                told = time.perf_counter() - began
            time.sleep(0.005)
        process.communicate()
        errors.seek(0)
        assert told and process.returncode == 0, (
            f"{' '.join(command)} ended with {process.returncode}:\n{errors.read()}"
        )
    after = os.times()
    return told, after.children_user + after.children_system - before.children_user - before.children_system


def write_prompts(folder: Path) -> None:
    """Write the prompts of both sides."""
    rows = [
        {"data_source": "letters", "prompt": f"{number} + {number} = ", "reward_model": {"ground_truth": ""}}
        for number in range(64)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure_real(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Our side alone with the real model: seconds until the first step begins, until its end, and CPU."""
    found: dict[str, list[float]] = {"begins": [], "ends": [], "cpu": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_prompts(folder)
        metrics = folder / "ours" / "metrics.jsonl"
        for number in range(-1 + bool(options.quick), options.quick or options.rounds):  # the first warms up
            shutil.rmtree(folder / "ours", ignore_errors=True)
            ends, cpu = timed(our_command(folder, options.real), threads, metrics)
            step = json.loads(metrics.read_text().splitlines()[0])
            if number >= 0:
                found["begins"].append(ends - step["timing_s/step"])
                found["ends"].append(ends)
                found["cpu"].append(cpu)
    case = {"threads": threads, **found}
    print(kit.line(real_line(case)), flush=True)
    return case


def real_line(case: dict[str, Any]) -> list[str]:
    """The row of a number of threads."""
    return [str(case["threads"]), *(kit.spread(case[name]) for name in ("begins", "ends", "cpu"))]


def real_part(real: dict[str, Any] | None) -> str:
    """The page's part on the real model; empty where it was never measured."""
    if real is None:
        return ""
    rounds = len(real["cases"][0]["ends"])
    goals = "\n".join(
        f"- {case['threads']} thread(s): the step begins after {statistics.median(case['begins']):.1f} s, "
        f"wanted within {REAL_BEGINS}: {kit.verdict(statistics.median(case['begins']) <= REAL_BEGINS)}"
        for case in real["cases"]
    )
    return f"""

A real model ({real["name"]}, float32) with the same rows and keys, our side alone, by `--real`; medians
(fastest–slowest) of {rounds}. {real["date"]}, {real["machine"]}, load {real["load"]:.1f} (goals are for a
quiet machine).

{kit.table(REAL_HEAD, [real_line(case) for case in real["cases"]])}

{goals}"""


def measure(options: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Both sides in turn."""
    from hybridflow.models.tiny import create_tiny_model

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        create_tiny_model(folder / "model")
        write_prompts(folder)

        def ours() -> tuple[float, float]:
            shutil.rmtree(folder / "ours", ignore_errors=True)
            return timed(our_command(folder, folder / "model"), threads, folder / "ours" / "metrics.jsonl")

        def trl() -> tuple[float, float]:
            return timed(kit.own_command(__file__, "--trl", folder), threads, None)

        found = kit.in_turn(
            {"ours": ours, "trl": trl}, options.quick or options.rounds, warm_up=0 if options.quick else 1
        )
    sides = {
        side: {"seconds": [wall for wall, _ in times], "cpu": [cpu for _, cpu in times]}
        for side, times in found.items()
    }
    case = {"threads": threads, "sides": sides}
    for line in lines_of(case):
        print(kit.line(line), flush=True)
    return case


def lines_of(case: dict[str, Any]) -> list[list[str]]:
    """Rows of the table."""
    rival = case["sides"]["trl"]["seconds"]
    return [
        [
            str(case["threads"]),
            side,
            kit.spread(found["seconds"]),
            kit.spread(found["cpu"]),
            "" if side == "trl" else kit.ratio(found["seconds"], rival),
        ]
        for side, found in case["sides"].items()
    ]


def goals_of(case: dict[str, Any]) -> str:
    """Whether the goals were met with a number of threads."""
    ours = statistics.median(case["sides"]["ours"]["seconds"])
    reached = ours / statistics.median(case["sides"]["trl"]["seconds"])
    return (
        f"- {case['threads']} thread(s): {reached:.2f} × TRL's time, wanted at most 1: "
        f"{kit.verdict(reached <= 1)}; "
        f"{ours:.1f} s, wanted under 10: {kit.verdict(ours < 10)}"
    )


def page_of(result: dict[str, Any]) -> str:
    """The page's text."""
    cases = result["cases"]
    rounds = len(cases[0]["sides"]["ours"]["seconds"])
    goals = "\n".join(map(goals_of, cases))
    return f"""A model of 0.4 M parameters, {PROMPTS} prompts × {GROUP} responses of at most {TOKENS} tokens;
seconds from the start of the process until its first step is told, medians (fastest–slowest) of {rounds} in
turn.
{kit.NOISE}

{kit.table(HEAD, [line for case in cases for line in lines_of(case)])}

Goals:

{goals}{real_part(result.get("real"))}"""


def main() -> None:
    """Measure one of the two tables, print, write both; with `--trl` be TRL's side."""
    parser = kit.arguments(__doc__, rounds=5)
    parser.add_argument("--real", type=Path, help="measure the second table, with the model of this folder")
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl:
        run_trl(options.trl)
        return
    result = kit.committed("start")
    if options.real:
        real = [measure_real(options, threads) for threads in options.threads]
        facts = kit.facts(["torch", "transformers"])
        more = {"name": options.real.name, "load": os.getloadavg()[1], "cases": real}
        result["real"] = {name: facts[name] for name in ("date", "machine")} | more
    elif not options.page:
        result["cases"] = [measure(options, threads) for threads in options.threads]
        result |= kit.facts(["torch", "transformers", "trl"])
    kit.write("start", result, "From the command to the first step", page_of(result), dry=options.quick)


if __name__ == "__main__":
    main()
