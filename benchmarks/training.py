"""Log-probs and update on this machine's CPU: our engine, TRL's own functions and a plain padded loop, on the
same rows, in turn.

    python benchmarks/training.py [--threads 1,2] [--rounds 7] [--patterns life,uniform] [--quick]
    (needs the extra `bench`)

The 4.3 M parameters and 128 rows of grpo_step.py, with responses of the same lengths. `log-probs` is the pass
without gradients, `update` forward, backward, clipping and an AdamW step.

    ours   `FSDPEngine` by the actor's worker: packed micro-batches, a prompt once for its responses
    (`use_prefix_grouper`); `ours-apart`
           has each row's own prompt
    trl    `GRPOTrainer._get_per_token_logps_and_entropies` and its `compute_loss`, all rows padded to the
    longest; 128 and 16 at a time
    plain  a transformers model, 16 rows at a time in the order of the batch, padded to the longest of the 16

Floor: the matrix products of the tokens that are no padding, each prompt once, at the rate that this process
reaches with them. Writes `benchmarks/results/training.json` and `.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import side_by_side as kit

ROWS = 128
PLAIN_ROWS = 16
TASKS = ("log-probs", "update")
GOAL = 2.0
"""How many times as fast as each of the others, where lengths are as in life."""
HEAD = ("threads", "lengths", "task", "side", "s", "CPU s", "ours is", "of the floor")


def make_rows(pattern: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and responses of a batch, by token ids."""
    import random

    draw = random.Random(1)
    prompts = [[draw.randrange(2, 262) for _ in range(kit.PROMPT)] for _ in range(ROWS // kit.GROUP)]
    responses = [[draw.randrange(2, 262) for _ in range(length)] for length in kit.lengths_of(ROWS, pattern)]
    return [prompts[row // kit.GROUP] for row in range(ROWS)], responses


class Ours:
    """The actor's worker on its engine."""

    def __init__(
        self, folder: Path, prompts: list[list[int]], responses: list[list[int]], keys: list[str]
    ) -> None:
        import torch

        from hybridflow.algorithms.aggregation import LossScale
        from hybridflow.config import PPOConfig
        from hybridflow.config.load import prepare_config
        from hybridflow.engines import BatchLimits
        from hybridflow.engines.build import build_engine
        from hybridflow.protocol import DataProto
        from hybridflow.protocol.packing import make_rows as padded
        from hybridflow.workers import ActorWorker

        config = prepare_config(
            PPOConfig,
            [
                f"actor_rollout_ref.model.path='{folder}'",
                f"data.tokenizer='{folder.parent / 'tokenizer'}'",
                f"data.train_files='{folder.parent / 'prompts.jsonl'}'",
                "actor_rollout_ref.actor.use_kl_loss=false",
                *keys,
            ],
            recipe="grpo",
        ).config.actor_rollout_ref
        engine = build_engine(
            "policy",
            {"path": folder, "device": "cpu", "dtype": "float32"},
            name="actor",
            optim=config.actor.optim,
            grad_clip=1.0,
        )
        self.actor = ActorWorker(
            engine,
            config.actor,
            temperature=1.0,
            log_prob_limits=BatchLimits(config.actor.ppo_max_token_len_per_gpu),
        )
        columns = padded(prompts, responses, kit.PAD)
        self.batch = DataProto.from_dict(columns | {"loss_mask": columns["response_mask"]})
        self.scale = LossScale.count(self.batch.batch["loss_mask"])
        self.advantages = (
            torch.randn(ROWS, 1, generator=torch.Generator().manual_seed(0))
            .expand(columns["responses"].shape)
            .contiguous()
        )
        self.log_probs()

    def log_probs(self) -> Any:
        """[B, R]."""
        self.old = self.actor.log_probs(self.batch, with_entropy=False).batch["old_log_probs"]
        return self.old

    def update(self) -> None:
        """One optimizer step."""
        from hybridflow.protocol import DataProto

        batch = self.batch | DataProto.from_dict({"old_log_probs": self.old, "advantages": self.advantages})
        self.actor.update_mini_batch(batch, scale=self.scale)


class Padded:
    """The common part of TRL and a plain loop: a transformers model and padded rows."""

    def __init__(self, folder: Path, prompts: list[list[int]], responses: list[list[int]]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.lengths = [len(response) for response in responses]
        longest = max(self.lengths)
        self.ids = torch.tensor(
            [
                prompt + response + [kit.PAD] * (longest - len(response))
                for prompt, response in zip(prompts, responses)
            ]
        )
        self.mask = torch.tensor(
            [[1] * (kit.PROMPT + length) + [0] * (longest - length) for length in self.lengths]
        )
        self.advantages = torch.randn(ROWS, generator=torch.Generator().manual_seed(0))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)

    def finish(self) -> None:
        """Clip, step, forget."""
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Plain(Padded):
    """A padded loop as one writes it, each micro-batch cut to its longest row."""

    def _log_probs(self, first: int) -> Any:
        part = slice(first, first + PLAIN_ROWS)
        width = kit.PROMPT + max(self.lengths[part])
        ids = self.ids[part, :width]
        mask = self.mask[part, :width]
        logits = self.model(input_ids=ids, attention_mask=mask).logits[:, kit.PROMPT - 1 : -1]
        return logits.log_softmax(-1).gather(-1, ids[:, kit.PROMPT :, None])[..., 0]

    def log_probs(self) -> Any:
        """[B, R] in parts."""
        import torch

        with torch.no_grad():
            return [self._log_probs(first) for first in range(0, ROWS, PLAIN_ROWS)]

    def update(self) -> None:
        """One optimizer step."""
        import torch

        total = sum(self.lengths)
        for first in range(0, ROWS, PLAIN_ROWS):
            log_probs = self._log_probs(first)
            part = slice(first, first + PLAIN_ROWS)
            mask = self.mask[part, kit.PROMPT : kit.PROMPT + log_probs.shape[1]]
            ratio = (log_probs - log_probs.detach()).exp()
            advantages = self.advantages[part, None]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            ((loss * mask).sum() / total).backward()
        self.finish()


class TRL(Padded):
    """TRL's own functions."""

    def __init__(
        self, folder: Path, prompts: list[list[int]], responses: list[list[int]], tokenizer: Path, rows: int
    ) -> None:
        import torch
        from datasets import Dataset
        from transformers import AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        super().__init__(folder, prompts, responses)
        settings = GRPOConfig(
            output_dir=str(folder / "trl"),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=ROWS // rows,
            num_generations=kit.GROUP,
            report_to="none",
            disable_tqdm=True,
        )
        self.rows = rows
        self.trainer = GRPOTrainer(
            self.model,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * ROWS}),
            processing_class=AutoTokenizer.from_pretrained(tokenizer, padding_side="left"),
        )
        self.trainer.current_gradient_accumulation_steps = ROWS // rows
        self.total = torch.tensor(sum(self.lengths))
        self.model.train()

    def log_probs(self) -> Any:
        """[B, R]."""
        import torch

        with torch.no_grad():
            found = self.trainer._get_per_token_logps_and_entropies(
                self.model, self.ids, self.mask, self.ids.shape[1] - kit.PROMPT, batch_size=self.rows
            )
        return found[0]

    def update(self) -> None:
        """One optimizer step."""
        for first in range(0, ROWS, self.rows):
            part = slice(first, first + self.rows)
            inputs = {
                "prompt_ids": self.ids[part, : kit.PROMPT],
                "prompt_mask": self.mask[part, : kit.PROMPT],
                "completion_ids": self.ids[part, kit.PROMPT :],
                "completion_mask": self.mask[part, kit.PROMPT :],
                "advantages": self.advantages[part],
                "num_items_in_batch": self.total,
            }
            self.trainer.compute_loss(self.model, inputs).backward()
        self.finish()


def agree(sides: dict[str, Any], lengths: list[int]) -> float:
    """The largest difference of log-probs between ours and the others, before anything is trained."""
    ours = sides["ours"].log_probs()
    worst = 0.0
    for name, side in sides.items():
        theirs = side.log_probs()
        rows = [row for part in (theirs if isinstance(theirs, list) else [theirs]) for row in part]
        for row, length in enumerate(lengths):
            worst = max(worst, float((rows[row][:length] - ours[row, :length]).abs().max()))
        assert worst < 1e-4, f"{name} has other log-probs than ours, by {worst}"
    return worst


def matrix_rate() -> float:
    """FLOP per second of the products of a layer, on 2,048 tokens."""
    import torch

    pairs = [
        (torch.randn(2048, inner), torch.randn(outer, inner))
        for inner, outer in ((256, 256), (256, 1024), (1024, 256))
    ]
    best = math.inf
    for _ in range(10):
        began = time.perf_counter()
        for left, right in pairs:
            torch.nn.functional.linear(left, right)
        best = min(best, time.perf_counter() - began)
    return sum(2 * 2048 * right.numel() for _, right in pairs) / best


def measure(options: argparse.Namespace, threads: int) -> list[dict[str, Any]]:
    """All patterns with a number of threads, in this process."""
    import torch

    torch.set_num_threads(threads)
    cases = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = kit.make_model(folder / "model", end=kit.END)
        kit.make_tokenizer(folder / "tokenizer")
        kit.write_prompts(folder / "prompts.jsonl", ROWS // kit.GROUP)
        rate = matrix_rate()
        for pattern in options.patterns:
            prompts, responses = make_rows(pattern)
            keys = [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={options.tokens}", *options.key]
            shared = "actor_rollout_ref.actor.use_prefix_grouper=true"
            sides: dict[str, Any] = {"ours": Ours(folder / "model", prompts, responses, [*keys, shared])}
            sides["ours-apart"] = Ours(folder / "model", prompts, responses, keys)
            for rows in (ROWS, PLAIN_ROWS):
                sides[f"trl-{rows}"] = TRL(folder / "model", prompts, responses, folder / "tokenizer", rows)
            sides["plain"] = Plain(folder / "model", prompts, responses)
            apart = agree(sides, list(map(len, responses)))
            tokens = ROWS // kit.GROUP * kit.PROMPT + sum(map(len, responses))
            for task, products in zip(TASKS, (2, 6)):
                ways = {
                    side: timed(getattr(worker, task.replace("-", "_"))) for side, worker in sides.items()
                }
                found = kit.in_turn(ways, options.quick or options.rounds, warm_up=0 if options.quick else 1)
                times = {
                    side: {"seconds": [wall for wall, _ in pairs], "cpu": [cpu for _, cpu in pairs]}
                    for side, pairs in found.items()
                }
                floor = products * parameters * tokens / rate
                case = {
                    "threads": threads,
                    "pattern": pattern,
                    "task": task,
                    "sides": times,
                    "floor_s": floor,
                    "apart": apart,
                    "rate": rate,
                }
                cases.append(case)
                for line in lines_of(case):
                    print(kit.line(line), flush=True)
    return cases


def timed(work: Callable[[], Any]) -> Callable[[], tuple[float, float]]:
    """Its wall-clock and CPU seconds."""

    def run() -> tuple[float, float]:
        wall = time.perf_counter()
        cpu = time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    return run


def lines_of(case: dict[str, Any]) -> list[list[str]]:
    """Rows of the table."""
    ours = case["sides"]["ours"]["seconds"]
    lines = []
    for side, found in case["sides"].items():
        seconds = statistics.median(found["seconds"])
        against = "" if side.startswith("ours") else kit.ratio(found["seconds"], ours, "as fast")
        cells = [
            case["threads"],
            case["pattern"],
            case["task"],
            side,
            kit.spread(found["seconds"]),
            kit.spread(found["cpu"]),
        ]
        lines.append([*map(str, cells), against, f"{case['floor_s'] / seconds:.2f}"])
    return lines


def goal_of(case: dict[str, Any]) -> str:
    """Whether the goal was met in a case with lengths as in life."""
    own = statistics.median(case["sides"]["ours"]["seconds"])
    rivals = [side for name, side in case["sides"].items() if not name.startswith("ours")]
    reached = min(statistics.median(side["seconds"]) for side in rivals) / own
    return (
        f"- {case['task']}, {case['threads']} thread(s): {reached:.2f} × as fast as the fastest of the "
        "others, "
        f"wanted {GOAL:.0f}: {kit.verdict(reached >= GOAL)}"
    )


def main() -> None:
    """Each number of threads in a process of its own, because torch takes its number once."""
    parser = kit.arguments(__doc__, rounds=7)
    parser.add_argument("--patterns", type=lambda text: text.split(","), default=["life", "uniform"])
    parser.add_argument("--tokens", type=int, default=2048, help="ours: tokens in a forward pass")
    parser.add_argument("--key", action="append", default=[], help="ours: a further key=value")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        options.into.write_text(json.dumps(measure(options, options.threads[0])))
        return
    cases: list[dict[str, Any]] = []
    for threads in options.threads:
        with tempfile.TemporaryDirectory() as folder:
            into = Path(folder) / "found.json"
            given = sys.argv[1:]
            subprocess.run(
                [sys.executable, __file__, *given, "--threads", str(threads), "--into", str(into)],
                check=True,
                env=kit.environment(threads),
            )
            cases += json.loads(into.read_text())
    result = kit.facts(["torch", "transformers", "trl"]) | {"cases": cases}
    apart = max(case["apart"] for case in cases)
    goals = "\n".join(goal_of(case) for case in cases if case["pattern"] == "life")
    text = f"""4.3 M parameters, {ROWS} rows of {kit.PROMPT} prompt tokens and at most {kit.MAX_TOKENS} more;
seconds, medians (fastest–slowest) of {options.quick or options.rounds} in turn. The log-probs of all sides
are within {apart:.0e}. `ours` computes a prompt once for its responses (`actor.use_prefix_grouper`, off by
default), `ours-apart` does not. `trl-{ROWS}` and `trl-{PLAIN_ROWS}` have so many rows in a forward pass,
padded to the longest; `plain` has {PLAIN_ROWS}, padded to the longest of these.

{kit.table(HEAD, [line for case in cases for line in lines_of(case)])}

{kit.NOISE}

Goals, where lengths are as in life:

{goals}"""
    kit.write("training", result, "Log-probs and update on a CPU", text, dry=options.quick)


if __name__ == "__main__":
    main()
