"""Is the native engine of one commit as fast as that of another? Both generate the same rows, in turn.

    python benchmarks/native_versions.py --old CHECKOUT [--new CHECKOUT] [--rows 64,128,512] [--rounds 15]
        [--model FOLDER] [--threads 1] [--page]

A model of 4.3 M parameters (or the one of --model), prompts of 15 tokens, eight responses each, at most 64
tokens, no end token. `uniform` is 64 tokens each, `life` log-normal with mean 0.4 of that. Each checkout is a
process of its own, idle while the other is asked; who goes first turns. The measure is CPU time, which other
work on the machine disturbs less than wall time; each round gives one ratio. `operations` counts what torch
dispatches in one generation, and depends on nothing else. Writes `benchmarks/results/native_versions.json`
and `.md`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import side_by_side as kit

HERE = Path(__file__).resolve().parents[1]
TITLE = "Two versions of the native engine"
HEAD = (
    "rows",
    "lengths",
    "old, tokens/CPU s",
    "new, tokens/CPU s",
    "new / old, CPU time",
    "wall time",
    "operations, old",
    "new",
    "same tokens",
)
TEXT = """{model}, threads: {threads}, prompts of {prompt} tokens, {group} responses each, at most {most}
tokens.

Each cell is the median over {rounds} rounds in turn, with the smallest and the largest. Ratios are those of
single rounds; below 1 the new version is faster. Load of the machine (processes that want to run) at the
start and at the end: {load}. `operations` are torch's, in one generation. `same tokens`: whether all tokens
are equal, and the largest difference of their log-probs.

{table}
"""


def serve(model: Path, rows: int) -> None:
    """A side: generate whenever asked, in the checkout that PYTHONPATH names."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from hybridflow.models.build import build_policy
    from hybridflow.protocol.prompt import Prompt
    from hybridflow.rollout.base import GenerationRequest, SamplingParams
    from hybridflow.rollout.native.engine import NativeEngine

    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    policy = build_policy(model, device=torch.device("cpu"), dtype="float32", probe=False)
    vocabulary = policy.head.weight.shape[0]
    engine = NativeEngine(policy, eos_token_ids=[], max_num_seqs=rows)
    kit.say({"ready": True})
    while True:
        asked = kit.next_question()
        requests = []
        for row, length in enumerate(asked["lengths"]):
            group = row // kit.GROUP
            tokens = [3 + (37 * group + 11 * place) % (vocabulary - 3) for place in range(kit.PROMPT)]
            prompt = Prompt(tuple(tokens))
            requests.append(GenerationRequest(row, prompt, SamplingParams(max_tokens=length), seed=row))
        if asked["detail"]:
            with Counter() as counter:
                outputs = list(engine.generate(requests))
            outputs.sort(key=lambda output: output.request_id)
            tokens = [output.token_ids for output in outputs]
            log_probs = [output.log_probs for output in outputs]
            kit.say({"operations": counter.count, "tokens": tokens, "log_probs": log_probs})
            continue
        began = time.perf_counter()
        used = time.process_time()
        list(engine.generate(requests))
        kit.say({"cpu": time.process_time() - used, "wall": time.perf_counter() - began})


class Checkout(kit.Side):
    """A side whose code is that of a checkout."""

    def __init__(self, source: Path, arguments: Sequence[object], threads: int) -> None:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = str(source / "src")
        super().__init__(kit.own_command(__file__, "--side", *arguments), threads)
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before
        self.first = self.answer()


def measure(model: Path, rows: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both patterns of lengths at a number of rows."""
    sides = {
        name: Checkout(source, (model, rows), options.threads)
        for name, source in (("old", options.old), ("new", options.new))
    }
    found = []
    for pattern in kit.LENGTHS:
        lengths = kit.lengths_of(rows, pattern)
        # the first generation, whose operations are counted, is also the warm-up
        details = {name: side.ask({"lengths": lengths, "detail": True}) for name, side in sides.items()}
        question = {"lengths": lengths, "detail": False}
        asks = {name: partial(side.ask, question) for name, side in sides.items()}
        case: dict[str, Any] = {"rows": rows, "lengths": pattern, "tokens": sum(lengths)}
        case["answers"] = kit.in_turn(asks, options.rounds, warm_up=0)
        case["operations"] = {name: detail["operations"] for name, detail in details.items()}
        case["same_tokens"] = details["old"]["tokens"] == details["new"]["tokens"]
        pairs = zip(details["old"]["log_probs"], details["new"]["log_probs"], strict=True)
        case["difference"] = max(abs(one - other) for pair in pairs for one, other in zip(*pair))
        print(kit.line(cells(case)), flush=True)
        found.append(case)
    for side in sides.values():
        side.close()
    return found


def cells(case: dict[str, Any]) -> list[object]:
    """A row of the table."""
    answers = case["answers"]
    speeds = [
        kit.spread([case["tokens"] / answer["cpu"] for answer in answers[name]], ",.0f")
        for name in ("old", "new")
    ]
    ratios = [
        kit.spread([new[kind] / old[kind] for old, new in zip(answers["old"], answers["new"], strict=True)])
        for kind in ("cpu", "wall")
    ]
    operations = [f"{case['operations'][name]:,}" for name in ("old", "new")]
    same = f"{'yes' if case['same_tokens'] else 'no'}, {case['difference']:.0e}"
    return [case["rows"], case["lengths"], *speeds, *ratios, *operations, same]


def page_of(result: dict[str, Any]) -> str:
    """The page's text."""
    return TEXT.format(
        model=result["model"],
        threads=result["threads"],
        prompt=kit.PROMPT,
        group=kit.GROUP,
        most=kit.MAX_TOKENS,
        rounds=result["rounds"],
        load=" and ".join(result["load"]),
        table=kit.table(HEAD, [cells(case) for case in result["cases"]]),
    )


def main() -> None:
    """All numbers of rows and both patterns."""
    if len(sys.argv) > 1 and sys.argv[1] == "--side":
        return serve(Path(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=HERE)
    parser.add_argument("--rows", type=kit.numbers, default=[64, 128, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--page", action="store_true", help="only write the page again, from the result")
    options = parser.parse_args()
    if options.page:
        result = kit.committed("native_versions")
        return kit.write("native_versions", result, TITLE, page_of(result))
    if options.old is None:
        parser.error("--old is missing: the checkout to compare with")
    load = [f"{os.getloadavg()[0]:.0f}"]
    print(kit.line(HEAD), kit.line(["---"] * len(HEAD)), sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        told = f"The model in {options.model}"
        model = options.model
        if model is None:
            model = Path(name)
            told = f"{kit.make_model(model) / 1e6:.1f} M parameters"
        found = [case for rows in options.rows for case in measure(model, rows, options)]
    load.append(f"{os.getloadavg()[0]:.0f}")
    facts = kit.facts(["torch", "transformers"], threads=options.threads)
    result = {**facts, "model": told, "rounds": options.rounds, "load": load, "cases": found}
    kit.write("native_versions", result, TITLE, page_of(result))


if __name__ == "__main__":
    main()
