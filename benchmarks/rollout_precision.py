"""What rounded weights (`rollout.quantization`) do to generation and to learning, beside whole ones.

    python benchmarks/rollout_precision.py --model FOLDER [--parts gap,learn] [--seeds 0,1,2] [--page]

`gap` takes a real model: speed, memory, and how far the log-probs of sampled tokens are off. `learn` are
demos of 40 steps of GRPO whose rollout has rounded weights, with the importance weights that a run must have,
and a control whose correction never acts. Writes `benchmarks/results/rollout_precision.json` and `.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import side_by_side as kit

if TYPE_CHECKING:
    from torch import Tensor

    from hybridflow.models.policy import PolicyModel
    from hybridflow.rollout.native.engine import NativeEngine

NAME = "rollout_precision"
TITLE = "Rounded weights in the rollout"
KINDS = ("int8", "fp8", "float16")
WHOLE = "float32"
ROWS = (8, 64)
TOKENS = 64
ROUNDS = 3
STEPS = 40
QUESTIONS = (
    "What is 7 + 15? Answer with a number.",
    "Write a short story about a fox.",
    "Explain why the sky is blue.",
    "Name three uses of copper.",
)
SAMPLES = 4
"""Answers to each question."""
CORRECTED = "algorithm.rollout_correction.rollout_is=token"
NEVER = (
    "algorithm.rollout_correction.rollout_rs=token_k1",
    "algorithm.rollout_correction.rollout_rs_threshold=1e9",
)
"""A rejection that rejects nothing: the gap is measured, and not corrected."""
RUNS: Mapping[str, tuple[str, ...]] = {
    WHOLE: (),
    **{kind: (f"actor_rollout_ref.rollout.quantization={kind}", CORRECTED) for kind in KINDS},
    "fp8, not corrected": ("actor_rollout_ref.rollout.quantization=fp8", *NEVER),
}
METRICS = {
    "training/rollout_probs_diff_mean": "difference of probabilities",
    "rollout_corr/k3_kl": "KL, a token",
    "rollout_corr/rollout_is_max": "largest weight",
}
TEXT = """\
The native engine's copies of the weights of linear layers; embeddings, head and norms stay whole. float32,
CPU, torch's kernels for {capability}; fp8 is computed there by torch's reference, for the numbers only: it is
made for GPUs that multiply fp8, on which nothing of this page has run.

## Speed and memory

{speed}

CPU seconds of one thread for a generation of {tokens} tokens a row, prompts of 32, medians of {rounds} rounds
(smallest to largest); the ratio is float32 / kind, above 1 the kind is faster. Load of the machine at start
and end: {load}. `rounding` is what each new version of the weights costs. {size}

## How far log-probs are off

{gap}

{tokens_seen} tokens that each kind sampled at temperature 1 from {model}, against log-probs of the whole
weights, in nats. `kept` is the effective part of the tokens under importance weights.

## Does it learn?

{learn}

GRPO of {steps} steps on arithmetic chains from a warm start (`hybridflow demo`), seeds {seeds}; greedy and
sampled are shares of 1,024 held-out questions, answered by the run's own rollout, with its kind of weights.
The standard error of one share is about 0.015, and one seed differs from another by far more. Runs with
rounded weights have `{corrected}`; the last line never corrects.
`seconds` are those of the reinforcement learning, on a machine that was shared.
"""


def engines(policy: PolicyModel) -> dict[str, NativeEngine]:
    """An engine of each kind on one policy, rounded, with the CPU seconds and bytes of that in `rounded`."""
    from hybridflow.models.copies.quantized_copy import QuantizedCopy
    from hybridflow.rollout.native.engine import NativeEngine

    made = {WHOLE: NativeEngine(policy, eos_token_ids=[])}
    for kind in KINDS:
        made[kind] = NativeEngine(policy, eos_token_ids=[], quantized=QuantizedCopy(policy, kind))
    return made


def speed(made: Mapping[str, NativeEngine]) -> dict[str, Any]:
    """CPU seconds of whole generations, in turn, and of rounding."""
    from hybridflow.protocol.prompt import Prompt
    from hybridflow.rollout.base import GenerationRequest, SamplingParams

    rounding: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for kind in KINDS:
        quantized = made[kind].quantized
        assert quantized is not None
        quantized.refresh()
        began = time.process_time()
        quantized.refresh()
        rounding[kind] = time.process_time() - began
        sizes[kind] = quantized.nbytes
        sizes[f"{kind}, whole"] = sum(
            weight.nbytes for name, weight in quantized.whole.named_parameters() if name in quantized.names
        )
    seconds: dict[str, dict[str, list[float]]] = {}
    for rows in ROWS:
        sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        requests = [
            GenerationRequest(row, Prompt(tuple(range(3 + row, 35 + row))), sampling, seed=row)
            for row in range(rows)
        ]

        def once(engine: NativeEngine, requests: Sequence[GenerationRequest] = requests) -> float:
            began = time.process_time()
            assert len(list(engine.generate(requests))) == len(requests)
            return time.process_time() - began

        names = [name for name in made if name != "fp8" or rows == ROWS[0]]
        ways = {name: (lambda name=name: once(made[name])) for name in names}
        seconds[str(rows)] = kit.in_turn(ways, ROUNDS, warm_up=1)
    return {"rounding": rounding, "bytes": sizes, "seconds": seconds}


def gap(made: Mapping[str, NativeEngine], folder: str) -> dict[str, Any]:
    """How far log-probs of sampled tokens are from those of the policy, by kind."""
    from transformers import AutoTokenizer

    from hybridflow.protocol import DataProto
    from hybridflow.protocol.packing import make_rows, pack
    from hybridflow.protocol.prompt import Prompt
    from hybridflow.rollout.base import GenerationRequest, SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = []
    for question in QUESTIONS * SAMPLES:
        chat = [{"role": "user", "content": question}]
        prompts.append(
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
    requests = [
        GenerationRequest(
            number, Prompt(tuple(ids)), SamplingParams(96, stop_token_ids=(tokenizer.eos_token_id,)), number
        )
        for number, ids in enumerate(prompts)
    ]
    found: dict[str, Any] = {}
    for name, engine in made.items():
        outputs = {each.request_id: each for each in engine.generate(requests)}
        answers = [outputs[number].token_ids for number in range(len(prompts))]
        rows = pack(DataProto.from_dict(make_rows(prompts, answers, pad_id=0)))
        sampled = [value for number in range(len(prompts)) for value in outputs[number].log_probs]
        found[name] = differences(engine.policy(rows).log_probs, sampled)
    return found


def differences(trained: Tensor, sampled: Sequence[float]) -> dict[str, float]:
    """Numbers on the log-probs [M] of training and of rollout, in nats."""
    import torch

    log_ratio = trained.double() - torch.tensor(sampled, dtype=torch.float64)
    weights = log_ratio.exp()
    return {
        "tokens": len(sampled),
        "mean": float(log_ratio.abs().mean()),
        "p99": float(log_ratio.abs().quantile(0.99)),
        "kl": float((weights - 1 - log_ratio).mean()),
        "kept": float(weights.mean() ** 2 / weights.square().mean()),
    }


def measure_model(folder: str) -> dict[str, Any]:
    """Speed, memory and gap of the model in `folder`."""
    import torch

    from hybridflow.models.files.build import build_policy

    torch.set_num_threads(1)
    with torch.no_grad():
        policy = build_policy(folder, device=torch.device("cpu"), dtype="float32", probe=False)
        made = engines(policy.requires_grad_(False))
        capability = torch.backends.cpu.get_cpu_capability()
        before = kit_load()
        result = {"speed": speed(made), "gap": gap(made, folder), "capability": capability}
    return {**result, "load": [before, kit_load()], "model": Path(folder).name}


def kit_load() -> int:
    """Processes that wanted to run in the last minute, on average."""
    return round(float(Path("/proc/loadavg").read_text().split()[0]))


def learn(name: str, seed: int, work: Path) -> dict[str, Any]:
    """One demo: accuracy before and after, and what its steps have measured."""
    out = work / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
    words = ["--seed", str(seed), "--out", str(out), f"trainer.total_training_steps={STEPS}", *RUNS[name]]
    command = [sys.executable, "-m", "hybridflow.cli.main", "demo", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=kit.environment(1), check=False)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed} ended with status {done.returncode}:\n{done.stdout[-3000:]}")
    summary = json.loads((out / "grpo" / "summary.json").read_text())
    lines = [json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "actor/pg_loss" in line]
    measured = {
        metric: statistics.mean(step[metric] for step in steps)
        for metric in METRICS
        if all(metric in step for step in steps)
    }
    kept = ("greedy_before", "greedy_after", "sampled_before", "sampled_after", "seconds_rl")
    return {"name": name, "seed": seed, **{key: summary[key] for key in kept}, **measured}


def speed_table(found: Mapping[str, Any]) -> str:
    """A line for each kind."""
    rows = []
    for name in (WHOLE, *KINDS):
        cells: list[object] = [name]
        for count in map(str, ROWS):
            seconds = found["seconds"][count]
            if name not in seconds:
                cells.append("–")
                continue
            shares = [one / own for one, own in zip(seconds[WHOLE], seconds[name], strict=True)]
            cells.append(f"{statistics.median(seconds[name]):.1f} s, {kit.spread(shares)}")
        whole = found["bytes"].get(f"{name}, whole", found["bytes"]["int8, whole"])
        cells.append(f"{found['bytes'].get(name, whole) / 2**20:.0f} MiB")
        cells.append(f"{found['rounding'][name]:.1f} s" if name in found["rounding"] else "–")
        rows.append(cells)
    head = ["weights", *(f"{count} rows" for count in ROWS), "linear layers", "rounding"]
    return kit.table(head, rows)


def gap_table(found: Mapping[str, Any]) -> str:
    """A line for each kind."""
    rows = [
        [name, f"{one['mean']:.4f}", f"{one['p99']:.3f}", f"{one['kl']:.5f}", f"{one['kept']:.3f}"]
        for name, one in found.items()
    ]
    return kit.table(["weights", "mean difference", "99th percentile", "KL, a token", "kept"], rows)


def learn_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A line for each kind, over the seeds."""
    rows = []
    for name in RUNS:
        own = [run for run in runs if run["name"] == name]
        if not own:
            continue
        cells: list[object] = [name]
        for what in ("greedy", "sampled"):
            cells.append(
                ", ".join(f"{run[f'{what}_before']:.2f} → {run[f'{what}_after']:.2f}" for run in own)
            )
        for metric in METRICS:
            values = [run[metric] for run in own if metric in run]
            cells.append(f"{statistics.mean(values):.2g}" if values else "–")
        cells.append(f"{statistics.mean(run['seconds_rl'] for run in own):.0f}")
        rows.append(cells)
    return kit.table(["weights", "greedy", "sampled", *METRICS.values(), "seconds"], rows)


def write(result: Mapping[str, Any]) -> None:
    """Write page and figures."""
    model = result["model"]
    sizes = model["speed"]["bytes"]
    text = TEXT.format(
        capability=model["capability"],
        speed=speed_table(model["speed"]),
        tokens=TOKENS,
        rounds=ROUNDS,
        load=" and ".join(map(str, model["load"])),
        size=f"Of {model['model']}, whose linear layers take {sizes['int8, whole'] / 2**20:.0f} MiB whole.",
        gap=gap_table(model["gap"]),
        tokens_seen=f"{min(one['tokens'] for one in model['gap'].values()):,} and more",
        model=model["model"],
        learn=learn_table(result["runs"]),
        steps=STEPS,
        seeds=", ".join(map(str, sorted({run["seed"] for run in result["runs"]}))),
        corrected=CORRECTED,
    )
    kit.write(NAME, result, TITLE, text)


def main() -> None:
    """Measure what is asked for, keep the rest as it is committed, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a real model")
    parser.add_argument("--parts", default="gap,learn")
    parser.add_argument("--seeds", type=kit.numbers, default=[0, 1, 2])
    parser.add_argument("--page", action="store_true", help="write the page anew from the committed figures")
    options = parser.parse_args()
    known: dict[str, Any] = {"runs": []}
    if (kit.RESULTS / f"{NAME}.json").exists():
        known = kit.committed(NAME)
    if not options.page:
        parts = options.parts.split(",")
        if "gap" in parts:
            known["model"] = measure_model(options.model)
        if "learn" in parts:
            with tempfile.TemporaryDirectory() as work:
                known["runs"] = []
                for seed, name in itertools.product(options.seeds, RUNS):
                    known["runs"].append(learn(name, seed, Path(work)))
                    print(json.dumps(known["runs"][-1]), flush=True)
        known = {**known, **kit.facts(["torch", "transformers"], threads=1)}
    write(known)


if __name__ == "__main__":
    main()
