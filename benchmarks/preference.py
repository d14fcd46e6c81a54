"""Preference losses learn, and a step of DPO against TRL's `DPOTrainer`, the same work in
turn.

    python benchmarks/preference.py [--model FOLDER] [--seeds 0,1,2] [--part learn|trl] [--quick]
    (part trl needs the extra `bench`)

learn    dpo, ipo, kto, simpo and orpo on pairs of worked arithmetic chains, of which one has a wrong step:
         the held-out margin before and after, with right labels and, as the control, with half of the labels
         swapped
trl      a model of 4.3 M parameters with random weights (Qwen 2), 16 pairs a step, prompts of 15 tokens and
         answers of at most 64, float32, AdamW; reference log-probs are computed before on both sides

`--model` is a model that knows the task, `DEMO/sft/model` of `hybridflow demo --out DEMO`; without it the
demo's warm-up makes one. Cells that `results/preference.json` has are not measured again. Writes that file
and `preference.md`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import side_by_side as kit

LOSSES = ("dpo", "ipo", "kto", "simpo", "orpo")
RATES = {"orpo": 1e-3}
"""Learning rates other than 3e-4: the odds ratio is a tenth of orpo's loss."""
LEARN_STEPS = {"kto": 60}
"""Steps other than 30: a row of kto's batch is one answer, and a pair of the others' is two."""
PAIRS = 16
STEPS = 12
PACKAGES = ("torch", "transformers")
COMMAND = "python benchmarks/preference.py"
LABELS = {"right": 0.0, "shuffled": 0.5}
TITLE = "Preferences"
CONTROL = """With shuffled labels margins fall rather than stay: the model gives right answers the higher
likelihood from the start, and training towards both answers alike removes that. `simpo` and `orpo` show it as
a margin that shrinks, and `kto` as one below 0, because its rewards count from the reference."""


def learn(model: Path, run: Path, loss: str, seed: int, labels: str, steps: int) -> dict[str, Any]:
    """Train for one cell of part `learn`; return what was measured on held-out data before and after."""
    from hybridflow.config import DPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.trainer.sft.build import build

    keys = [
        f"model.path='{model}'",
        f"trainer.default_local_dir='{run}'",
        "trainer.logger=[]",
        "trainer.resume_mode=disable",
        "trainer.test_freq=1000000",
        "trainer.device=cpu",
        f"algorithm.loss={loss}",
        f"trainer.seed={seed}",
        f"data.task.options.swapped={LABELS[labels]}",
        f"trainer.total_training_steps={steps}",
        f"optim.lr={RATES.get(loss, 3e-4)}",
        "data.train_batch_size=32",
        "data.task.size=1600",
        "data.task.val_size=128",
    ]
    began = time.perf_counter()
    with build(prepare_config(DPOConfig, keys, recipe="tiny/dpo").config) as trainer:
        assert trainer.validator is not None
        before = trainer.validator(0)
        after = trainer.fit()
    return {"before": before, "after": after, "seconds": time.perf_counter() - began}


def make_pairs(folder: Path) -> None:
    """Model, tokenizer and pairs of part `trl`."""
    kit.make_model(folder / "model", end=kit.END)
    kit.make_tokenizer(folder / "tokenizer")
    draw = random.Random(1)
    lengths = kit.lengths_of(2 * PAIRS * STEPS, "life")
    prompts = kit.make_prompts(PAIRS * STEPS)
    texts = ["".join(draw.choices(kit.characters(), k=length)) for length in lengths]
    rows = [
        {"prompt": prompt, "chosen": texts[2 * index], "rejected": texts[2 * index + 1]}
        for index, prompt in enumerate(prompts)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_ours(options: argparse.Namespace) -> None:
    """Our side: the real trainer."""
    import torch  # noqa: F401  (imported before the memory is read)
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # noqa: F401

    from hybridflow.config import DPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.trainer.sft.build import build

    baseline = kit.memory()["now"]
    kit.forget_peak()
    work = Path(options.folder)
    keys = [
        f"model.path='{work / 'model'}'",
        f"data.tokenizer='{work / 'tokenizer'}'",
        f"data.train_files='{work / 'pairs.jsonl'}'",
        f"data.train_batch_size={PAIRS}",
        "data.max_length=128",
        "data.shuffle=false",
        "model.enable_gradient_checkpointing=false",
        "optim.lr=1e-4",
        "optim.weight_decay=0.0",
        f"trainer.num_threads={options.threads[0]}",
        f"trainer.default_local_dir='{work / 'run'}'",
        "trainer.device=cpu",
        "trainer.controller=local",
        "trainer.logger=[]",
    ]
    with build(prepare_config(DPOConfig, keys).config) as trainer:
        kit.say({"baseline": baseline})
        for step in range(1, STEPS + 1):
            kit.next_question()
            began = time.perf_counter()
            _, metrics = trainer.step(trainer.source.next(step).rows, step)
            loss = metrics.to_floats()["train/loss"]
            kit.say({"seconds": time.perf_counter() - began, "loss": loss, "memory": kit.memory()})
        kit.next_question()


def run_trl(options: argparse.Namespace) -> None:
    """TRL's side, in the order of the data, as ours."""
    import torch
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    baseline = kit.memory()["now"]
    kit.forget_peak()
    torch.set_num_threads(options.threads[0])
    work = Path(options.folder)

    class InOrder(DPOTrainer):  # type: ignore[misc]
        """Reads the pairs in the order of the data."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset if dataset is not None else self.train_dataset)

    class Waits(TrainerCallback):  # type: ignore[misc]
        """Answers where a step has been logged."""

        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            kit.next_question()
            self.began = time.perf_counter()

        def on_log(
            self, args: Any, state: Any, control: Any, logs: dict[str, float], **keywords: Any
        ) -> None:
            if "loss" in logs:
                seconds = time.perf_counter() - self.began
                kit.say({"seconds": seconds, "loss": float(logs["loss"]), "memory": kit.memory()})

    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()]
    settings = DPOConfig(
        output_dir=str(work / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PAIRS,
        max_length=128,
        precompute_ref_log_probs=True,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        num_train_epochs=1,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = InOrder(
        AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32),
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(work / "tokenizer"),
        callbacks=[Waits()],
    )
    kit.say({"baseline": baseline})
    trainer.train()
    kit.next_question()


def against_trl(threads: int) -> dict[str, Any]:
    """Both sides, step by step in turn."""
    with tempfile.TemporaryDirectory() as name:
        make_pairs(Path(name))
        commands = {
            side: kit.own_command(__file__, "--side", side, "--folder", name, "--threads", threads)
            for side in ("ours", "trl")
        }
        with kit.open_sides(commands, threads) as sides:
            steps = kit.in_turn({side: process.ask for side, process in sides.items()}, STEPS, warm_up=0)
            baselines = {side: process.first["baseline"] for side, process in sides.items()}
    return {
        side: {
            "seconds": [answer["seconds"] for answer in answers[2:]],
            "losses": [answer["loss"] for answer in answers],
            "memory": max(answer["memory"]["peak"] for answer in answers) - baselines[side],
        }
        for side, answers in steps.items()
    }


def page_of(result: dict[str, Any]) -> str:
    """The page's text, of the parts that were measured."""
    parts = []
    cells = result["cells"]
    rows = []
    for loss in LOSSES:
        for labels in LABELS:
            found = [cell for name, cell in cells.items() if name.startswith(f"learn {loss} {labels} ")]
            if found:
                margins = [[cell[when]["val/margin"] for cell in found] for when in ("before", "after")]
                accuracy = [cell["after"]["val/accuracy"] for cell in found]
                rows.append([loss, labels, len(found), *map(_signed, margins), kit.spread(accuracy, ".3f")])
    if rows:
        head = ("loss", "labels", "seeds", "held-out margin before", "after", "accuracy after")
        parts.append(f"## Preference losses\n\n{kit.table(head, rows)}\n\n{CONTROL}")
    if "trl" in cells:
        ours = cells["trl"]["ours"]
        trl = cells["trl"]["trl"]
        apart = max(abs(a - b) for a, b in zip(ours["losses"], trl["losses"], strict=True))
        rows = [
            [side, kit.spread(cells["trl"][side]["seconds"], ".3f"), f"{cells['trl'][side]['memory']:.0f}"]
            for side in ("ours", "trl")
        ]
        text = kit.table(("side", "s a step", "memory of the training, MiB"), rows)
        parts.append(
            f"## DPO against TRL\n\n{PAIRS} pairs a step, the same in the same order. The sides take "
            f"turns step by step, on cores that other work may share.\n\n{text}\n\n"
            f"- speed: {kit.ratio(trl['seconds'], ours['seconds'], 'as fast as TRL')}\n"
            f"- losses of {len(ours['losses'])} steps differ by at most {apart:.1e}, wanted 1e-4: "
            f"{kit.verdict(apart <= 1e-4)}"
        )
    return "\n\n".join(parts)


def _signed(values: list[float]) -> str:
    return f"{statistics.median(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})"


def measure(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure the cells that are not there yet, and write after each."""
    cells = result["cells"]
    steps = {loss: LEARN_STEPS.get(loss, 30) for loss in LOSSES}
    if options.quick:
        steps = dict.fromkeys(LOSSES, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jobs: dict[str, Any] = {}
        if options.part in ("all", "trl"):
            jobs["trl"] = lambda: against_trl(options.threads[0])
        for seed in options.seeds:
            if options.part in ("all", "learn"):
                for labels in LABELS:
                    for loss in LOSSES:
                        jobs[f"learn {loss} {labels} {seed}"] = lambda loss=loss, labels=labels, seed=seed: (
                            learn(
                                model_of(options, folder),
                                folder / f"{loss} {labels} {seed}",
                                loss,
                                seed,
                                labels,
                                steps[loss],
                            )
                        )
        for cell, job in jobs.items():
            if cell not in cells:
                cells[cell] = job()
                print(cell, cells[cell], flush=True)
                kit.write("preference", result, TITLE, page_of(result), dry=options.quick)


def model_of(options: argparse.Namespace, folder: Path) -> Path:
    """The model that knows the task; the demo's warm-up makes it once."""
    if options.model:
        return Path(options.model)
    from hybridflow.demo.demo import WarmUpOptions, warm_up
    from hybridflow.models.tiny import create_tiny_model

    if not (folder / "sft" / "model").is_dir():
        create_tiny_model(folder / "model")
        warm_up(folder / "model", folder / "sft", seed=0, options=WarmUpOptions())
    return folder / "sft" / "model"


def main() -> None:
    """Measure, or be a side of part `trl`."""
    parser = kit.arguments(__doc__, rounds=STEPS)
    parser.set_defaults(threads=[1])
    parser.add_argument("--model", default="")
    parser.add_argument("--seeds", type=kit.numbers, default=[0, 1, 2])
    parser.add_argument("--part", choices=("all", "learn", "trl"), default="all")
    parser.add_argument("--side", choices=("ours", "trl"))
    parser.add_argument("--folder")
    options = parser.parse_args()
    if options.side == "ours":
        run_ours(options)
    elif options.side == "trl":
        run_trl(options)
    else:
        result: dict[str, Any] = {
            **kit.facts(PACKAGES, COMMAND, options.threads),
            "cells": {},
        }
        if (kit.RESULTS / "preference.json").is_file() and not options.quick:
            result["cells"] = kit.committed("preference")["cells"]
        if not options.page:
            measure(options, result)
        kit.write("preference", result, TITLE, page_of(result), dry=options.quick)


if __name__ == "__main__":
    main()
