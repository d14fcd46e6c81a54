"""Is the native engine of one commit as fast as that of another? Both generate the same rows, in turn.

    python benchmarks/native_versions.py --old CHECKOUT [--new CHECKOUT] [--model tiny,real] [--threads 1,2]
        [--rows 64,128,512] [--rounds 15] [--page]

The models of bench_models.py, prompts of 15 tokens, eight responses each, no end token. Responses of the
tiny model have at most 64 tokens, those of the 135 M model 8, so that all of it takes about half an hour.
`uniform` is all of them for each response, `life` log-normal with mean 0.4 of that. Each checkout is a
process of its own, idle while the other is asked; who goes first turns. The measure is CPU time, which other
work on the machine disturbs less than wall time; each round gives one ratio. `operations` counts what torch
dispatches in one generation, and depends on nothing else. Writes `benchmarks/results/native_versions.json`
and `.md` after each model and number of threads.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_models
import side_by_side as kit

HERE = Path(__file__).resolve().parents[1]
TITLE = "Two versions of the native engine"
MOST_TOKENS = {"tiny": kit.MAX_TOKENS, "real": 8}
LEAST = 0.97
"""The new version may be slower by so much within what is measured."""
HEAD = (
    "model",
    "threads",
    "rows",
    "lengths",
    "old, tokens/CPU s",
    "new, tokens/CPU s",
    "new / old, by CPU time",
    "95 %",
    "by wall time",
    "operations, old",
    "new",
    "same tokens",
)
TEXT = """Prompts of {prompt} tokens, {group} responses each, at most 64 tokens (the 135 M model: 8).

Each cell is the median over {rounds} rounds in turn, with the smallest and the largest. Ratios are those of
the speeds in single rounds; above 1 the new version is faster. `95 %` is the interval of the median ratio by
CPU time that the order of the rounds' ratios gives, whatever their distribution. Load of the machine
(processes that want to run) at the start and at the end: {load}. `operations` are torch's, in one generation.
`same tokens`: whether all tokens are equal, and the largest difference of their log-probs.

{table}

- the new version is as fast (the interval reaches {least} or more): {kept}
- it is faster where lengths are as in life (the interval is above 1): {faster}
"""


def serve(model: Path, rows: int) -> None:
    """A side: generate whenever asked, in the checkout that PYTHONPATH names."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    try:
        from hybridflow.models.files.build import build_policy
    except ModuleNotFoundError:  # an older checkout
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


def measure(
    folder: Path, model: str, threads: int, rows: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Both patterns of lengths at a number of rows."""
    sides = {
        name: Checkout(source, (folder, rows), threads)
        for name, source in (("old", options.old), ("new", options.new))
    }
    found = []
    for pattern in kit.LENGTHS:
        most = MOST_TOKENS[model]
        lengths = [max(1, length * most // kit.MAX_TOKENS) for length in kit.lengths_of(rows, pattern)]
        # the first generation, whose operations are counted, is also the warm-up
        details = {name: side.ask({"lengths": lengths, "detail": True}) for name, side in sides.items()}
        question = {"lengths": lengths, "detail": False}
        asks = {name: partial(side.ask, question) for name, side in sides.items()}
        case: dict[str, Any] = {"model": model, "threads": threads, "rows": rows, "lengths": pattern}
        case["tokens"] = sum(lengths)
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


def ratios(case: dict[str, Any], kind: str) -> list[float]:
    """How much faster the new version was in each round, by `cpu` or `wall` time."""
    answers = case["answers"]
    return [old[kind] / new[kind] for old, new in zip(answers["old"], answers["new"], strict=True)]


def interval(found: Sequence[float]) -> tuple[float, float]:
    """The narrowest interval between two of the values, as far from both ends, that has their true median in
    at least 95 of 100 cases; the whole range where they are too few.

    Each value is above the median with probability 1/2, so how many are follows the binomial distribution.
    """
    values = sorted(found)
    outside = 0.0
    drop = 0
    while drop < len(values) // 2:
        outside += 2 * math.comb(len(values), drop) / 2 ** len(values)
        if outside > 0.05:
            break
        drop += 1
    first = max(0, drop - 1)
    return values[first], values[-1 - first]


def cells(case: dict[str, Any]) -> list[object]:
    """A row of the table."""
    answers = case["answers"]
    speeds = [
        kit.spread([case["tokens"] / answer["cpu"] for answer in answers[name]], ",.0f")
        for name in ("old", "new")
    ]
    low, high = interval(ratios(case, "cpu"))
    by_time = [kit.spread(ratios(case, "cpu")), f"{low:.3f}–{high:.3f}", kit.spread(ratios(case, "wall"))]
    operations = [f"{case['operations'][name]:,}" for name in ("old", "new")]
    same = f"{'yes' if case['same_tokens'] else 'no'}, {case['difference']:.0e}"
    size = bench_models.MODELS[case["model"]].size
    named = [size, case["threads"], case["rows"], case["lengths"]]
    return [*named, *speeds, *by_time, *operations, same]


def verdict(cases: Sequence[dict[str, Any]], holds: Callable[[tuple[float, float]], bool]) -> str:
    """Whether all cases hold, and of how many that is not so."""
    missed = sum(not holds(interval(ratios(case, "cpu"))) for case in cases)
    return "met" if not missed else f"**missed** in {missed} of {len(cases)} cases"


def page_of(result: dict[str, Any]) -> str:
    """The page's text."""
    cases = result["cases"]
    life = [case for case in cases if case["lengths"] == "life"]
    return TEXT.format(
        prompt=kit.PROMPT,
        group=kit.GROUP,
        rounds=result["rounds"],
        load=" and ".join(result["load"]),
        least=LEAST,
        kept=verdict(cases, lambda bounds: bounds[1] >= LEAST),
        faster=verdict(life, lambda bounds: bounds[0] > 1),
        table=kit.table(HEAD, [cells(case) for case in cases]),
    )


def main() -> None:
    """All models, numbers of threads and rows, and both patterns."""
    if len(sys.argv) > 1 and sys.argv[1] == "--side":
        return serve(Path(sys.argv[2]), int(sys.argv[3]))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=HERE)
    bench_models.add_choice(parser)
    parser.add_argument("--rows", type=kit.numbers, default=[64, 128, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=kit.numbers, default=[1, 2])
    parser.add_argument("--page", action="store_true", help="only write the page again, from the result")
    options = parser.parse_args()
    if options.page:
        result = kit.committed("native_versions")
        return kit.write("native_versions", result, TITLE, page_of(result))
    if options.old is None:
        parser.error("--old is missing: the checkout to compare with")
    load = [f"{os.getloadavg()[0]:.0f}"]
    found: list[dict[str, Any]] = []
    print(kit.line(HEAD), kit.line(["---"] * len(HEAD)), sep="\n", flush=True)
    for model in bench_models.available(options.model):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            bench_models.write_model(model, folder)
            for threads in options.threads:
                for rows in options.rows:
                    found += measure(folder, model.name, threads, rows, options)
                facts = kit.facts(["torch", "transformers"], threads=threads)
                so_far = {"load": [*load, f"{os.getloadavg()[0]:.0f}"], "cases": found}
                result = {**facts, "rounds": options.rounds, **so_far}
                kit.write("native_versions", result, TITLE, page_of(result))


if __name__ == "__main__":
    main()
