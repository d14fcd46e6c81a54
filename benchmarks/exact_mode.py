"""Exact mode: does it hold over a run, in any company and after a resume, does a flipped bit stop it, and
what does it cost?

    python benchmarks/exact_mode.py [--steps 20] [--only run,company,resume,bit,price]        (`make exact`;
    about 10 minutes)

Prints a table, writes `benchmarks/results/exact_mode.json` and `.md`, and ends with status 1 where anything
differs that must not. One thread. The model is the demo's, warmed up for a few steps so that rewards vary.
Prices are CPU seconds, exact and fast in turn.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from exact_price import policy_of, price
from side_by_side import machine, verdict

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.demo.demo import WarmUpOptions, warm_up
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.self_check import choose_exact_mode
from hybridflow.trainer.ppo.build import build
from hybridflow.trainer.source import TrainBatch

RESULT = Path(__file__).parent / "results" / "exact_mode"
PARTS = ("run", "company", "resume", "bit", "price")
LONGEST = 80
"""Tokens of the tiny task's longest row."""
PLANTS = Path(__file__).parents[1] / "tests" / "e2e"
"""Where `plant_a_bit` is, which flips the bit."""
PAGE = """# Exact mode

{date} · `{command}` · {machine}

Written by benchmarks/exact_mode.py; do not edit.

## Does it hold

| what | measured | wanted | |
|---|---|---|---|
{facts}

What a flipped bit in a replica's process says:

> {message}

## What it costs

CPU seconds of one thread, exact and fast in turn, the fastest of {repeats} each. A row is prompt and
response together; all rows have the same length, and nothing stops early. `forward` is a pass for log-probs,
`update` a forward and a backward pass.

{price}
"""


def keys(model: Path, run: Path, *overrides: str, steps: int) -> list[str]:
    """Return the keys of the tiny task's GRPO, with one mini-batch: an update first looks at all rows."""
    return [
        f"actor_rollout_ref.model.path='{model}'",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.rollout.exact=true",
        f"trainer.default_local_dir='{run}'",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=10",
        "trainer.max_ckpt_to_keep=5",
        "trainer.test_freq=-1",
        "trainer.val_before_train=false",
        "trainer.logger=[]",
        *overrides,
    ]


def train(model: Path, run: Path, steps: int) -> dict[str, Any]:
    """A run from where its folder is; by step: what was sampled, digested, and what was measured."""
    seen: dict[str, Any] = {}
    config = prepare_config(PPOConfig, keys(model, run, steps=steps), recipe="tiny/grpo").config
    with build(config) as trainer:
        real = trainer.source.next

        def watched(step: int) -> TrainBatch:
            made = real(step)
            batch = made.rows
            sampled = [batch.batch[name].numpy().tobytes() for name in ("responses", "rollout_log_probs")]
            seen[str(step)] = {"sampled": hashlib.sha256(b"".join(sampled)).hexdigest(), "rows": len(batch)}
            return made

        trainer.source.next = watched  # type: ignore[method-assign]
        trainer.fit(after_step=lambda step, logged: seen[str(step)].update(logged) or False)
    return seen


def check_run(steps: dict[str, Any], wanted: int) -> list[tuple[str, Any, Any]]:
    """(what, measured, wanted) of a run of `wanted` steps."""
    lines = list(steps.values())
    rows = sum(line["rows"] for line in lines)
    return [
        ("steps", len(lines), wanted),
        ("rows checked, of all steps", sum(line["training/rollout_rows_checked"] for line in lines), rows),
        (
            "max of |rollout − training log-prob|",
            max(line["training/rollout_log_probs_diff_max"] for line in lines),
            0.0,
        ),
        (
            "steps without a pass for old log-probs",
            sum(line["training/old_log_probs_from_rollout"] for line in lines),
            len(lines),
        ),
        (
            "smallest ratio at the first mini-batch",
            min(line["training/first_ratio_min"] for line in lines),
            1.0,
        ),
        (
            "largest ratio at the first mini-batch",
            max(line["training/first_ratio_max"] for line in lines),
            1.0,
        ),
        ("max of |actor/ppo_kl|", max(abs(line["actor/ppo_kl"]) for line in lines), 0.0),
        (
            "steps whose rewards vary",
            sum(line["critic/score/max"] > line["critic/score/min"] for line in lines),
            len(lines),
        ),
        (
            "the section old_log_prob takes under 2 % of the time of the steps",
            _share(lines, "old_log_prob") < 0.02,
            True,
        ),
    ]


def _share(lines: list[dict[str, Any]], section: str) -> float:
    """Share of the time of whole steps."""
    return float(
        sum(line[f"timing_s/{section}"] for line in lines) / sum(line["timing_s/step"] for line in lines)
    )


def check_resume(model: Path, run: Path, steps: dict[str, Any], folder: Path) -> list[tuple[str, Any, Any]]:
    """The run again from its checkpoint of step 10, in a new process: the steps after it."""
    again = folder / "resumed"
    shutil.copytree(run, again)
    for path in again.glob("global_step_*"):
        if path.name != "global_step_10":
            shutil.rmtree(path)
    (again / "latest_checkpointed_iteration.txt").write_text("10")
    command = [
        sys.executable,
        __file__,
        "--train",
        str(model),
        str(again),
        "--steps",
        "12",
        "--out",
        str(folder / "resumed.json"),
    ]
    subprocess.run(command, check=True)
    found = json.loads((folder / "resumed.json").read_text())
    same = [step for step in ("11", "12") if found.get(step, {}).get("sampled") == steps[step]["sampled"]]
    return [
        ("after a resume at step 10, steps done", sorted(found), ["11", "12"]),
        ("of these with the same rows, to the bit", len(same), 2),
    ]


def company(model: Path) -> list[tuple[str, Any, Any]]:
    """512 rows together; some alone, all in another order, in few slots, with prompts in pieces, and joining
    late.
    """
    policy = policy_of(model)
    engine = NativeEngine(policy, eos_token_ids=(2,), max_num_seqs=512)
    mode = choose_exact_mode(engine, policy, longest=LONGEST, temperature=1.0)
    assert isinstance(mode, ExactMode), mode
    policy.exact = mode
    asked = requests(512, policy.head.weight.shape[0])
    together = answers(engine.generate(asked))
    found = []
    alone = {row: out for one in asked[::16] for row, out in answers(engine.generate([one])).items()}
    found.append(("alone", alone))
    found.append(
        ("in another order", answers(engine.generate([asked[(place * 37) % 512] for place in range(512)])))
    )
    few = NativeEngine(policy, eos_token_ids=(2,), max_num_seqs=40, max_num_batched_tokens=24)
    found.append(("in 40 slots, prompts in pieces of 24 tokens", answers(few.generate(asked[::-1]))))
    found.append(("joining a session two at a step", joining(engine, asked)))
    torch.set_num_threads(2)
    found.append(("by two threads", answers(engine.generate(asked))))
    torch.set_num_threads(1)
    return [
        (
            f"rows that are as among 512: {what}",
            sum(together[row] == one for row, one in rows.items()),
            len(rows),
        )
        for what, rows in found
    ]


def requests(count: int, vocabulary: int) -> list[GenerationRequest]:
    """Eight responses to each prompt, of different lengths."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for row in range(count):
        if row % 8 == 0:
            prompt = tuple(torch.randint(3, vocabulary, (1 + (row * 5) % 32,), generator=draw).tolist())
        made.append(
            GenerationRequest(row, Prompt(prompt), SamplingParams(max_tokens=8 + row % 41), seed=1000 + row)
        )
    return made


def answers(outputs: Iterable[GenerationOutput]) -> dict[int, tuple[list[int], list[float]]]:
    """Tokens and log-probs by request."""
    return {output.request_id: (output.token_ids, output.log_probs) for output in outputs}


def joining(
    engine: NativeEngine, asked: Sequence[GenerationRequest]
) -> dict[int, tuple[list[int], list[float]]]:
    """Rows that enter while others run."""
    session = engine.open()
    left = list(asked[:128])
    outputs = []
    while left or not session.idle:
        session.add(left[:2])
        left = left[2:]
        outputs += session.step()
    session.close()
    return answers(outputs)


def flipped_bit(model: Path, folder: Path) -> str:
    """Return the error of a run whose replica, in a process of its own, has one bit flipped after its first
    push of weights.
    """
    more = [
        "actor_rollout_ref.model.external_lib=plant_a_bit",
        "trainer.controller=ray",
        "trainer.resource_pools={train: [1], generate: [1]}",
        "trainer.placement={rollout: generate}",
        "ray_kwargs.ray_init.num_cpus=2",
    ]
    command = [
        sys.executable,
        "-m",
        "hybridflow.cli.main",
        "train",
        "--recipe",
        "tiny/grpo",
        *keys(model, folder / "bit", *more, steps=4),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PLANTS)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "exact mode, step" in line]
    return said[-1].strip() if done.returncode == 1 and said else f"NOT STOPPED (status {done.returncode})"


def measure(parts: Sequence[str], steps: int, folder: Path) -> dict[str, Any]:
    """Measure the chosen parts."""
    tiny = create_tiny_model(folder / "model", seed=0)
    model = warm_up(
        tiny, folder / "sft", seed=0, options=WarmUpOptions(first_check=10**6, max_steps=90)
    ).model
    facts: list[tuple[str, Any, Any]] = []
    result: dict[str, Any] = {"message": "", "price": []}
    if "run" in parts or "resume" in parts:
        lines = train(model, folder / "run", steps)
        facts += check_run(lines, steps)
        if "resume" in parts:
            facts += check_resume(model, folder / "run", lines, folder)
    if "company" in parts:
        facts += company(model)
    if "bit" in parts:
        result["message"] = flipped_bit(model, folder)
        told = (
            "exact mode, step 2: rollout rank 0 has generated with another "
            "model.layers.0.mlp.down_proj.weight"
        )
        facts.append(
            (
                "a flipped bit in a replica's process stops step 2 and is named",
                told in result["message"],
                True,
            )
        )
    if "price" in parts:
        result["price"] = price(model, folder)
    return result | {
        "facts": [{"what": what, "measured": found, "wanted": wanted} for what, found, wanted in facts]
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--train", nargs=2, metavar=("MODEL", "RUN"), help="only this run, to --out")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", action="store_true", help="only write the page again, from the result")
    options = parser.parse_args()
    if options.page:
        RESULT.with_suffix(".md").write_text(write_page(json.loads(RESULT.with_suffix(".json").read_text())))
        return 0
    torch.set_num_threads(1)
    if options.train:
        model, run = map(Path, options.train)
        options.out.write_text(json.dumps(train(model, run, options.steps)))
        return 0
    parts = options.only.split(",")
    with tempfile.TemporaryDirectory() as folder:
        result = measure(parts, max(12, options.steps), Path(folder))
    missed = [fact for fact in result["facts"] if fact["measured"] != fact["wanted"]]
    result = {
        "command": " ".join(["python", "benchmarks/exact_mode.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{machine()}, torch {torch.__version__}, one thread",
        **result,
    }
    page = write_page(result)
    print(page)
    if parts == list(PARTS):
        RESULT.with_suffix(".json").write_text(json.dumps(result, indent=2) + "\n")
        RESULT.with_suffix(".md").write_text(page)
    return 1 if missed else 0


def write_page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    facts = [
        f"| {fact['what']} | {fact['measured']} | {fact['wanted']} | "
        f"{verdict(fact['measured'] == fact['wanted'])} |"
        for fact in result["facts"]
    ]
    rows = [
        f"| {line['what']} | {line['fast']:.4f} | {line['exact']:.4f} | {line['exact'] / line['fast']:.2f} |"
        for line in result["price"]
    ]
    table = "\n".join(["| what | fast, s | exact, s | ratio |", "|---|---|---|---|", *rows])
    shown = {
        **result,
        "facts": "\n".join(facts),
        "price": table,
        "repeats": result["price"][0]["repeats"] if result["price"] else 0,
    }
    return PAGE.format(**shown)


if __name__ == "__main__":
    raise SystemExit(main())
