"""A GRPO step on this machine's CPU: this project's trainer against TRL's `GRPOTrainer`, the same work, in
turn.

    python benchmarks/grpo_step.py [--threads 1,2] [--rounds 5] [--patterns uniform,life] [--quick]
    (needs the extra `bench`)

A model of 4.3 M parameters with random weights (Qwen 2, hidden 256, 4 layers, vocabulary 262, tied), 16
prompts of 15 tokens, eight responses each, at most 64 tokens, float32, one AdamW step a batch, no KL term.
Two patterns of lengths, the same for all sides row by row:

    uniform   64 tokens each
    life      log-normal, mean 0.4 of the maximum

    ours         `Trainer.fit`, what `hybridflow train` runs (local controller): the rollout's log-probs
    stand for the old
                 ones where 16 rows differ by at most 1e-3 nats, and a prompt is computed once for its
                 responses (`use_prefix_grouper`)
    ours-exact   the same in exact mode: the log-probs of rollout and training are equal to the bit, so each
    row has its own prompt
    trl          `GRPOTrainer.train` with all 128 rows in one forward pass
    trl-16       the same with 16 rows at a time and 8 accumulation steps, which takes less memory

In TRL a row that is to have n tokens samples n - 1 and then the end token: generation goes on until the
longest row has ended, as in life. A step is the time from the end of one to the end of the next: loader,
generation, decoding, reward, training, metrics, logging. Each side runs in a process of its own; its peak is
that of its resident memory after all imports, less what was resident then. Where exact mode does not hold on
this machine the table says so in place of its figures. Writes `benchmarks/results/grpo_step.json` and `.md`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import side_by_side as kit
from letters_reward import reward

PROMPTS = 16
ROWS = 128
SIDES = ("ours", "ours-exact", "trl", "trl-16")
SHARES = ("generation", "forward", "backward")
TITLE = "A GRPO step on a CPU"
IMPOSSIBLE = "does not hold on this machine"
GOALS = {("uniform", 1): 1.15, ("uniform", 2): 1.3, ("life", 1): 2.5, ("life", 2): 2.5}
"""How many times as fast as the faster of TRL's sides, by lengths and threads."""
MEMORY_GOALS = {"trl": 0.25, "trl-16": 0.7}
"""Share of the memory of each."""


class Clock:
    """Seconds of a step and of its parts; a part's seconds are added up where it runs several times."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.began = (time.perf_counter(), time.process_time())

    def begin(self) -> None:
        """A step begins now."""
        self.parts = dict.fromkeys(SHARES, 0.0)
        self.began = (time.perf_counter(), time.process_time())

    def end(self) -> dict[str, Any]:
        """Return the times of the step and the memory of the process by now."""
        wall, cpu = self.began
        return {
            "seconds": time.perf_counter() - wall,
            "cpu": time.process_time() - cpu,
            **self.parts,
            "memory": kit.memory(),
        }

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """The seconds of what runs within belong to a part."""
        began = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def watch_training(self, module: Any) -> None:
        """Forward passes of `module` that are trained on, and all backward passes."""
        import torch

        backward = torch.Tensor.backward
        forward = module.forward

        def timed_backward(*args: Any, **keywords: Any) -> None:
            with self.part("backward"):
                backward(*args, **keywords)

        def timed_forward(*args: Any, **keywords: Any) -> Any:
            with self.part("forward" if torch.is_grad_enabled() else "other"):
                return forward(*args, **keywords)

        # type: ignore[assignment, method-assign]
        torch.Tensor.backward = timed_backward
        module.forward = timed_forward


def run_ours(options: argparse.Namespace, *, exact: bool) -> None:
    """Our side: the real trainer; it waits where a step has ended."""
    from dataclasses import replace

    import torch  # noqa: F401  (imported before the memory is read)
    from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # noqa: F401

    from hybridflow.config import PPOConfig
    from hybridflow.config.load import prepare_config
    from hybridflow.errors import ConfigError
    from hybridflow.trainer.ppo.build import build

    baseline = kit.memory()["now"]
    kit.forget_peak()
    work = Path(options.folder)
    keys = [
        f"actor_rollout_ref.model.path='{work / 'model'}'",
        f"data.tokenizer='{work / 'tokenizer'}'",
        f"data.train_files='{work / 'prompts.jsonl'}'",
        f"data.train_batch_size={PROMPTS}",
        f"data.max_prompt_length={kit.PROMPT}",
        f"data.max_response_length={kit.MAX_TOKENS}",
        "actor_rollout_ref.actor.use_kl_loss=false",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={options.tokens}",
        f"actor_rollout_ref.rollout.n={kit.GROUP}",
        f"actor_rollout_ref.rollout.max_num_seqs={ROWS}",
        "actor_rollout_ref.rollout.ignore_eos=true",
        f"actor_rollout_ref.rollout.exact={str(exact).lower()}",
        *(
            []
            if exact
            else [
                "actor_rollout_ref.rollout.reuse_log_probs_within=1e-3",
                "actor_rollout_ref.actor.use_prefix_grouper=true",
            ]
        ),
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        f"reward.custom_reward_function.path='{Path(__file__).with_name('letters_reward.py')}'",
        "reward.num_workers=0",
        f"trainer.num_threads={options.threads[0]}",
        f"trainer.default_local_dir='{work / ('exact' if exact else 'ours')}'",
        "trainer.device=cpu",
        "trainer.controller=local",
        "trainer.logger=[]",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1000",
        *options.key,
    ]
    clock = Clock()
    lengths = kit.lengths_of(ROWS, options.patterns[0])
    with ExitStack() as stack:
        try:
            trainer = stack.enter_context(build(prepare_config(PPOConfig, keys, recipe="grpo").config))
        except ConfigError as error:
            if not exact or "cannot hold" not in str(error):
                raise
            kit.say({"baseline": baseline, "impossible": str(error)})
            return
        rollout = trainer.source.roles.rollout
        generate = rollout.generate

        def with_lengths(requests: Any, **keywords: Any) -> Any:
            asked = [
                replace(one, sampling=replace(one.sampling, max_tokens=length))
                for one, length in zip(requests, lengths, strict=True)
            ]
            with clock.part("generation"):
                return generate(asked, **keywords)

        rollout.generate = with_lengths  # type: ignore[method-assign]
        clock.watch_training(trainer.step.roles.actor.backend.worker("actor").engine.module)  # type: ignore[attr-defined]
        kit.say({"baseline": baseline})
        kit.next_question()
        clock.begin()

        def stepped(step: int, metrics: dict[str, float]) -> bool:
            tokens = int(metrics["rollout/generated_tokens"])
            assert tokens == sum(lengths), f"{tokens} tokens were generated instead of {sum(lengths)}"
            kit.say(
                clock.end()
                | {
                    "tokens": tokens,
                    "logged": {k: v for k, v in metrics.items() if k.startswith("timing_s/")},
                }
            )
            kit.next_question()
            clock.begin()
            return False

        trainer.fit(after_step=stepped)


def run_trl(options: argparse.Namespace, *, rows: int) -> None:
    """TRL's side, `rows` in a forward pass; it waits where a step has ended."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        LogitsProcessor,
        LogitsProcessorList,
        Qwen2ForCausalLM,  # noqa: F401
        TrainerCallback,
    )
    from trl import GRPOConfig, GRPOTrainer

    baseline = kit.memory()["now"]
    kit.forget_peak()
    torch.set_num_threads(options.threads[0])
    work = Path(options.folder)
    clock = Clock()
    lengths = torch.tensor(kit.lengths_of(ROWS, options.patterns[0]))

    class Ends(LogitsProcessor):  # type: ignore[misc]
        """The end token stands where a row's last token is to be, and nowhere before."""

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            done = input_ids.shape[1] - kit.PROMPT
            scores[:, kit.END] = -torch.inf
            last = (lengths == done + 1) & (lengths < kit.MAX_TOKENS)
            scores[last] = -torch.inf
            scores[last, kit.END] = 0.0
            return scores

    class Waits(TrainerCallback):  # type: ignore[misc]
        """Answers where a step has ended."""

        def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
            tokens = int(lengths.sum())
            kit.say(clock.end() | {"tokens": tokens})
            kit.next_question()
            clock.begin()

    texts = [json.loads(line)["prompt"] for line in (work / "prompts.jsonl").read_text().splitlines()]
    model = AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32)
    generate = model.generate

    def with_lengths(*args: Any, **keywords: Any) -> Any:
        with clock.part("generation"):
            out = generate(*args, **keywords, logits_processor=LogitsProcessorList([Ends()]))
        ends = (out[:, kit.PROMPT :] == kit.END).int()
        found = torch.where(ends.any(1), ends.argmax(1) + 1, out.shape[1] - kit.PROMPT)
        assert torch.equal(found, lengths), (
            f"rows of {found.tolist()} tokens were generated instead of {lengths.tolist()}"
        )
        return out

    model.generate = with_lengths
    settings = GRPOConfig(
        output_dir=str(work / f"trl-{rows}"),
        use_cpu=True,
        bf16=False,  # the defaults, bfloat16 and gradient checkpointing, take several times as long on a CPU
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=ROWS // rows,
        num_generations=kit.GROUP,
        max_completion_length=kit.MAX_TOKENS,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        num_train_epochs=1000,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(work / "tokenizer", padding_side="left"),
        callbacks=[Waits()],
    )
    clock.watch_training(model)
    kit.say({"baseline": baseline})
    kit.next_question()
    clock.begin()
    trainer.train()


def make_work(folder: Path) -> None:
    """Model, tokenizer and prompts."""
    kit.make_model(folder / "model", end=kit.END)
    kit.make_tokenizer(folder / "tokenizer")
    kit.write_prompts(folder / "prompts.jsonl", 4 * PROMPTS)


def measure(options: argparse.Namespace, pattern: str, threads: int) -> dict[str, Any]:
    """All sides on one pattern."""
    rounds = options.quick or options.rounds
    with tempfile.TemporaryDirectory() as name:
        make_work(Path(name))
        extra = ["--tokens", options.tokens, *(part for key in options.key for part in ("--key", key))]
        commands = {
            side: kit.own_command(
                __file__,
                "--side",
                side,
                "--folder",
                name,
                "--patterns",
                pattern,
                "--threads",
                threads,
                *extra,
            )
            for side in options.sides
        }
        with kit.open_sides(commands, threads) as sides:
            baselines = {side: process.first["baseline"] for side, process in sides.items()}
            impossible = {
                side: process.first["impossible"]
                for side, process in sides.items()
                if "impossible" in process.first
            }
            steps = kit.in_turn(
                {side: process.ask for side, process in sides.items() if side not in impossible},
                rounds,
                warm_up=1 if options.quick else 2,
            )
    found: dict[str, Any] = {"pattern": pattern, "threads": threads, "sides": {}, "impossible": impossible}
    for side, answers in steps.items():
        peak = max(answer["memory"]["peak"] for answer in answers)
        found["sides"][side] = {
            "seconds": [answer["seconds"] for answer in answers],
            "cpu": [answer["cpu"] for answer in answers],
            "parts": {part: statistics.median(answer[part] for answer in answers) for part in SHARES},
            "tokens": answers[0]["tokens"],
            "memory_mib": {"baseline": baselines[side], "peak": peak, "step": peak - baselines[side]},
            "logged": answers[-1].get("logged"),
        }
    for line in lines_of(found):
        print(kit.line(line), flush=True)
    return found


HEAD = (
    "threads",
    "lengths",
    "side",
    "s a step",
    "generation",
    "forward",
    "backward",
    "peak, MiB",
    "of them the step",
    "ours is",
)


def lines_of(case: dict[str, Any]) -> list[list[str]]:
    """Rows of the table."""
    ours = case["sides"].get("ours")
    lines = []
    for side, found in case["sides"].items():
        memory = found["memory_mib"]
        parts = [f"{found['parts'][part]:.2f}" for part in SHARES]
        line = [case["threads"], case["pattern"], side, kit.spread(found["seconds"]), *parts]
        line += [f"{memory['peak']:.0f}", f"{memory['step']:.0f}"]
        against = ""
        if ours is not None and side.startswith("trl"):
            share = ours["memory_mib"]["step"] / memory["step"]
            faster = kit.ratio(found["seconds"], ours["seconds"], "as fast")
            against = f"{faster}, {share:.2f} of the memory"
        lines.append([*map(str, line), against])
    for side in case.get("impossible", {}):
        blank = [""] * (len(HEAD) - 4)
        lines.append([str(case["threads"]), case["pattern"], side, IMPOSSIBLE, *blank])
    return lines


def goals_of(cases: list[dict[str, Any]]) -> list[str]:
    """For each case whether its goals were met, against the faster of TRL's sides and the memory of both."""
    found = []
    for case in cases:
        wanted = GOALS.get((case["pattern"], case["threads"]))
        rivals = {name: side for name, side in case["sides"].items() if name in MEMORY_GOALS}
        ours = case["sides"].get("ours")
        if ours is None or wanted is None or not rivals:
            continue
        fastest = min(statistics.median(side["seconds"]) for side in rivals.values())
        reached = fastest / statistics.median(ours["seconds"])
        told = [
            f"{reached:.2f} × as fast as the faster of TRL's sides, wanted {wanted}: "
            + kit.verdict(reached >= wanted)
        ]
        for name, side in rivals.items():
            part = ours["memory_mib"]["step"] / side["memory_mib"]["step"]
            told.append(
                f"{part:.2f} of the memory of {name}, wanted at most {MEMORY_GOALS[name]}: "
                + kit.verdict(part <= MEMORY_GOALS[name])
            )
        found.append(f"- {case['pattern']}, {case['threads']} thread(s): {'; '.join(told)}")
    return found


def page_of(result: dict[str, Any]) -> str:
    """The page's text."""
    cases = result["cases"]
    rounds = len(next(iter(cases[0]["sides"].values()))["seconds"])
    goals = "\n".join(goals_of(cases))
    return f"""4.3 M parameters, {PROMPTS} prompts × {kit.GROUP} responses of at most {kit.MAX_TOKENS}
tokens. Seconds of a whole step, medians (fastest–slowest) of {rounds} in turn. The parts are medians of
their own, so they need not add up to the step. Memory: the peak of what is resident; "the step": less what
was resident after the imports.
{kit.NOISE}

`ours` is in fast mode, with two keys: `actor.use_prefix_grouper` (a prompt is computed once for its
responses) and `rollout.reuse_log_probs_within=1e-3`. `ours-exact` is exact mode, with neither. `trl` has all
rows in one forward pass, `trl-16` 16 at a time; both without bfloat16 and gradient checkpointing, its
defaults, which are slower on a CPU.

{kit.table(HEAD, [line for case in cases for line in lines_of(case)])}

Goals:

{goals}"""


def main() -> None:
    """Measure, print, write; with `--side` be a side."""
    parser = kit.arguments(__doc__, rounds=5)
    parser.add_argument("--patterns", type=lambda text: text.split(","), default=list(kit.LENGTHS))
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SIDES))
    parser.add_argument("--tokens", type=int, default=1280, help="ours: tokens in a forward pass")
    parser.add_argument("--key", action="append", default=[], help="ours: a further key=value")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        if options.side == "trl":
            run_trl(options, rows=ROWS)
        elif options.side == "trl-16":
            run_trl(options, rows=16)
        else:
            run_ours(options, exact=options.side == "ours-exact")
        return
    if options.page:
        result = kit.committed("grpo_step")
        kit.write("grpo_step", result, TITLE, page_of(result))
        return
    cases = [
        measure(options, pattern, threads) for threads in options.threads for pattern in options.patterns
    ]
    result = kit.facts(["torch", "transformers", "trl"]) | {"tokens_a_pass": options.tokens, "cases": cases}
    kit.write("grpo_step", result, TITLE, page_of(result), dry=options.quick)


if __name__ == "__main__":
    sys.exit(main())
