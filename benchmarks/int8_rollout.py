"""Would int8 weights make generation on a CPU faster? Ways to multiply by rounded weights, beside float32.

    python benchmarks/int8_rollout.py [--threads 1,2] [--rows 1,4,8,16,32,64,128] [--rounds 5]
        [--quality FOLDER] [--page]

A model of the shape of SmolLM2-135M with random weights. `products` are those of one decode step: every
linear layer once, and the head, each with its own weights, so that they come from memory as they do in a run.
`step` is a whole step of the native engine, whose layers and head are replaced by a way; ways take turns step
by step within one session. The measure is CPU time. All of it is in one process for each number of threads.
--quality: a folder with a real model, whose log-probs of its own samples are compared with float32's.
Writes `benchmarks/results/int8_rollout.json` and `.md`.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import int8_quality
import side_by_side as kit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hybridflow.rollout.native.engine import NativeEngine

TITLE = "Rounded weights for generation on a CPU"
SHAPE = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
PLAIN = "float32"
STEPS = ("int8 weights, bfloat16 inputs", "int8 weights and inputs", "float16 weights")
"""Ways that are tried in the engine too."""
GENERATIONS = ((8, 1), (8, 8), (64, 1), (64, 8), (128, 8))
"""(rows, maximum of tokens / 64) of the generations that are reckoned; rows that were measured."""
SLOW = 1.0
"""Seconds of one round from which on a way is not measured again, at more rows neither."""
TEXT = """\
{sizes:.1f} M parameters in the shape of SmolLM2-135M, float32, CPU time, torch's kernels for
{capability}. **The machine was shared with other work**: load (processes that want to run) at the start
and at the end {load}, on two cores. Sides took turns within one process, so the ratios count; seconds do
not. Ratios are float32 / way of single rounds, above 1 the way is faster: median of {rounds} rounds, with
the smallest and the largest.

## Verdict

{verdict}

## Products of one decode step

{products}

`int8`: one scale for each output channel, symmetric. `int8 weights` alone is `_weight_int8pack_mm`; `int8
weights and inputs` is `quantized.linear_dynamic` of fbgemm, whose inputs get seven bits on AVX2 and one
scale for the whole batch; `…, a scale a row` gives each row its own. `float16 weights` is fbgemm's
`linear_dynamic_fp16`, with float32 inputs and sums. `packed float32` is oneDNN with weights packed once.
A way that took more than a second for a step was not measured further (–).

## A whole step of the native engine

{steps}

## A whole generation, with the copy

Reckoned from the steps above: lengths log-normal with mean 0.4 of the maximum (`life`), rows leave as
they end, each step takes the faster of float32 and the way, and the copy is made once, as in training.

{generations}

## Preparing a copy

CPU seconds to make the copy from float32 weights, once for each version of the weights, and its size.

{copies}

## What rounding does to the policy

{quality}
"""


class Way(NamedTuple):
    """A way to multiply by weights [N, K] that were prepared."""

    prepare: Callable[[Tensor], Any]
    product: Callable[[Tensor, Any], Tensor]
    """(inputs [B, K] float32, what was prepared) -> [B, N] float32."""
    bytes_per_weight: int


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 weights [N, K] and scales [N], symmetric for each output channel."""
    import torch

    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


def packed_int8(weight: Tensor) -> Any:
    """Return int8 weights as fbgemm wants them."""
    import torch

    torch.backends.quantized.engine = "fbgemm"
    numbers, scales = rounded(weight)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    tensor = torch._make_per_channel_quantized_tensor(numbers, scales.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(tensor, None)


def make_ways() -> dict[str, Way]:
    """All ways, the one that is in use first."""
    import torch
    from torch.nn.functional import linear

    ops = torch.ops.quantized

    def by_bfloat16(inputs: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        return torch._weight_int8pack_mm(inputs.bfloat16(), *own).float()

    def for_bfloat16(weight: Tensor) -> tuple[Tensor, Tensor]:
        numbers, scales = rounded(weight)
        return numbers, scales.bfloat16()

    def by_rows(inputs: Tensor, own: Any) -> Tensor:
        largest = inputs.abs().amax(1, keepdim=True)
        product = ops.linear_with_input_q_dq_qweight_dq_output_fp32(inputs / largest, 1 / 63, 64, own)
        return product.mul_(largest)

    def by_int_mm(inputs: Tensor, own: tuple[Tensor, Tensor]) -> Tensor:
        scale = inputs.abs().amax(1, keepdim=True) / 127
        numbers = (inputs / scale).round_().to(torch.int8)
        return torch._int_mm(numbers, own[0].t()).float().mul_(scale).mul_(own[1])

    return {
        PLAIN: Way(lambda weight: weight, linear, 4),
        "packed float32": Way(
            lambda weight: torch.ops.mkldnn._reorder_linear_weight(weight, 8),
            lambda inputs, own: torch.ops.mkldnn._linear_pointwise(inputs, own, None, "none", [], ""),
            4,
        ),
        "bfloat16": Way(
            lambda weight: weight.bfloat16(), lambda inputs, own: linear(inputs.bfloat16(), own).float(), 2
        ),
        "float16 weights": Way(
            lambda weight: ops.linear_prepack_fp16(weight, None), ops.linear_dynamic_fp16, 2
        ),
        "int8 weights, float32 inputs": Way(
            rounded, lambda inputs, own: torch._weight_int8pack_mm(inputs, *own), 1
        ),
        "int8 weights, bfloat16 inputs": Way(for_bfloat16, by_bfloat16, 1),
        "int8 weights, made float32 in each step": Way(
            rounded, lambda inputs, own: linear(inputs, own[0].float()).mul_(own[1]), 1
        ),
        "int8 weights and inputs": Way(
            packed_int8, lambda inputs, own: ops.linear_dynamic(inputs, own, True), 1
        ),
        "int8 weights and inputs, a scale a row": Way(packed_int8, by_rows, 1),
        "int8 weights and inputs, by `_int_mm`": Way(rounded, by_int_mm, 1),
    }


def linears(model: nn.Module) -> list[nn.Linear]:
    """Every linear layer, the head last."""
    from torch import nn

    return [module for module in model.modules() if type(module) is nn.Linear]


def prepared(ways: dict[str, Way], layers: Sequence[nn.Linear]) -> tuple[dict[str, Any], dict[str, float]]:
    """Return what each way prepared for each layer, and the CPU seconds it took; ways that this build of
    torch or this processor lacks are told and left out.
    """
    import torch

    copies: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name in list(ways):
        try:
            began = time.process_time()
            copies[name] = [ways[name].prepare(layer.weight) for layer in layers]
            seconds[name] = time.process_time() - began
            ways[name].product(torch.randn(2, layers[0].in_features), copies[name][0])
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            print(f"{name} is not here: {error}", file=sys.stderr, flush=True)
            del ways[name]
    return copies, seconds


def products(
    ways: dict[str, Way],
    copies: dict[str, Any],
    layers: Sequence[nn.Linear],
    rows: int,
    rounds: int,
    slow: set[str],
) -> dict[str, list[float]]:
    """CPU seconds of all products of a decode step of `rows` rows, a value for each round.

    Ways in `slow` are left out, and those that are too slow here are added to it.
    """
    import torch

    inputs = {size: torch.randn(rows, size) for size in {layer.in_features for layer in layers}}
    known = set(slow)

    def once(name: str) -> float | None:
        if name in slow:
            return None
        product = ways[name].product
        began = time.process_time()
        for layer, own in zip(layers, copies[name], strict=True):
            product(inputs[layer.in_features], own)
        used = time.process_time() - began
        if used > SLOW and name != PLAIN:
            slow.add(name)
        return used

    asks = {name: (lambda name=name: once(name)) for name in ways if name not in known}
    found = kit.in_turn(asks, rounds, warm_up=1)
    return {name: [used for used in values if used is not None] for name, values in found.items()}


@contextmanager
def layers_by(way: Way | None, copies: dict[int, Any]) -> Iterator[None]:
    """Have the native engine multiply in this way while it decodes; None: as it is."""
    from hybridflow.models import flat_decoder

    if way is None:
        yield
        return
    before = flat_decoder._project

    def project(module: Any, states: Tensor) -> Tensor:
        product = way.product(states.flatten(0, -2), copies[id(module)])
        if module.bias is not None:
            product = product.add_(module.bias)
        return product.view(*states.shape[:-1], -1)

    flat_decoder._project = project
    try:
        yield
    finally:
        flat_decoder._project = before


def steps(
    engine: NativeEngine,
    ways: dict[str, Way],
    copies: dict[str, Any],
    layers: Sequence[nn.Linear],
    rows: int,
    rounds: int,
) -> dict[str, list[float]]:
    """CPU seconds of a whole step of the engine with `rows` rows, a value for each round."""
    from hybridflow.protocol.prompt import Prompt
    from hybridflow.rollout.base import GenerationRequest, SamplingParams

    prompt = Prompt(tuple(range(3, 3 + kit.PROMPT)))
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    session = engine.open(closed=True)
    session.add([GenerationRequest(row, prompt, sampling, seed=row) for row in range(rows)])
    for _ in range(3):
        session.step()
    head = engine.policy.head
    own_of = {name: dict(zip(map(id, layers), copies[name], strict=True)) for name in copies}

    def once(name: str) -> float:
        way = None
        if name != PLAIN:
            way = ways[name]
            own = own_of[name][id(head)]
            head.forward = lambda states: way.product(states, own)  # type: ignore[method-assign]
        with layers_by(way, own_of[name]):
            began = time.process_time()
            session.step()
            used = time.process_time() - began
        vars(head).pop("forward", None)
        return used

    names = [PLAIN, *(name for name in STEPS if name in ways)]
    found = kit.in_turn({name: (lambda name=name: once(name)) for name in names}, rounds, warm_up=1)
    session.close()
    return found


def serve(folder: str) -> None:
    """A side: one number of threads. A question is a number of rows and of rounds."""
    import torch

    from hybridflow.models.files.build import build_policy
    from hybridflow.rollout.native.engine import NativeEngine

    torch.set_grad_enabled(False)
    policy = build_policy(folder, device=torch.device("cpu"), dtype="float32", probe=False)
    layers = linears(policy.hf)
    ways = make_ways()
    copies, seconds = prepared(ways, layers)
    weights = sum(layer.weight.numel() for layer in layers)
    sizes = {name: weights * ways[name].bytes_per_weight for name in ways}
    slow: set[str] = set()
    engine = NativeEngine(policy, eos_token_ids=[], max_num_seqs=1024)
    capability = torch.backends.cpu.get_cpu_capability()
    kit.say({"seconds": seconds, "sizes": sizes, "capability": capability})
    while True:
        asked = kit.next_question()
        rows = asked["rows"]
        found = {"products": products(ways, copies, layers, rows, asked["rounds"], slow)}
        found["step"] = steps(engine, ways, copies, layers, rows, asked["rounds"])
        kit.say(found)


def ratios(found: dict[str, list[float]], name: str) -> str:
    """Return how many times as fast as float32 a way is."""
    if len(found.get(name, [])) < len(found[PLAIN]):
        return "–"
    return kit.spread([plain / used for plain, used in zip(found[PLAIN], found[name], strict=True)])


def speeds(result: dict[str, Any], what: str) -> str:
    """A table of `products` or `step`: a line for each way, a column for each number of rows."""
    lines = []
    for threads, cases in result["cases"].items():
        for name in next(iter(cases.values()))[what]:
            if name != PLAIN:
                cells = [ratios(case[what], name) for case in cases.values()]
                lines.append([threads, name, *cells])
        plain = [f"{1000 * statistics.median(case[what][PLAIN]):.0f} ms" for case in cases.values()]
        lines.append([threads, "float32, CPU time", *plain])
    rows = [f"{rows} rows" for rows in next(iter(result["cases"].values()))]
    return kit.table(["threads", "way", *rows], lines)


def step_seconds(cases: dict[str, Any], name: str, rows: int) -> float:
    """CPU seconds of a step of the engine, between two measured numbers of rows in proportion."""
    known = [(int(count), statistics.median(case["step"][name])) for count, case in cases.items()]
    for (low, less), (high, more) in itertools.pairwise(known):
        if rows <= high:
            return less + (more - less) * (rows - low) / (high - low)
    return known[-1][1]


def generations(result: dict[str, Any]) -> str:
    """A table of whole generations: times as fast as float32, the copy included."""
    lines = []
    for threads, cases in result["cases"].items():
        for name in STEPS:
            cells = []
            for rows, scale in GENERATIONS:
                lengths = [scale * length for length in kit.lengths_of(rows, "life")]
                running = [sum(length > step for length in lengths) for step in range(max(lengths))]
                plain = [step_seconds(cases, PLAIN, count) for count in running]
                rounded = [step_seconds(cases, name, count) for count in running]
                best = result["copies"]["seconds"][name] + sum(map(min, plain, rounded))
                cells.append(f"{sum(plain) / best:.2f}")
            lines.append([threads, name, *cells])
    heads = [f"{rows} rows, at most {scale * kit.MAX_TOKENS} tokens" for rows, scale in GENERATIONS]
    return kit.table(["threads", "way", *heads], lines)


def page_of(result: dict[str, Any]) -> str:
    """The page's text."""
    copies = result["copies"]
    made = [
        [name, f"{copies['seconds'][name]:.1f}", f"{copies['sizes'][name] / 2**20:.0f} MiB"]
        for name in copies["sizes"]
        if name != PLAIN
    ]
    return TEXT.format(
        sizes=result["parameters"] / 1e6,
        load=" and ".join(result["load"]),
        rounds=result["rounds"],
        verdict=result["verdict"],
        products=speeds(result, "products"),
        steps=speeds(result, "step"),
        copies=kit.table(["way", "CPU s", "size"], made),
        quality=int8_quality.told(result["quality"], result["quality_of"]),
        capability=result["copies"]["capability"],
        generations=generations(result),
    )


def main() -> None:
    """All numbers of threads and rows."""
    if len(sys.argv) > 1 and sys.argv[1] == "--side":
        return serve(sys.argv[2])
    parser = kit.arguments(__doc__, rounds=5)
    parser.add_argument("--rows", type=kit.numbers, default=[1, 4, 8, 16, 32, 64, 128])
    parser.add_argument("--quality", help="a folder with a real model")
    options = parser.parse_args()
    if options.page:
        result = {**kit.committed("int8_rollout"), "verdict": VERDICT}
        return kit.write("int8_rollout", result, TITLE, page_of(result))
    rounds = options.quick or options.rounds
    result: dict[str, Any] = {"cases": {}, "rounds": rounds, "verdict": VERDICT}
    result["load"] = [f"{os.getloadavg()[0]:.0f}"]
    with tempfile.TemporaryDirectory() as name:
        result["parameters"] = kit.make_model(Path(name), **SHAPE)
        for threads in options.threads:
            side = kit.Side(kit.own_command(__file__, "--side", name), threads)
            first = side.answer()
            result.setdefault("copies", first)
            cases = result["cases"].setdefault(str(threads), {})
            for rows in options.rows:
                cases[str(rows)] = side.ask({"rows": rows, "rounds": rounds})
                print(f"{threads} threads, {rows} rows", file=sys.stderr, flush=True)
            side.close()
    result = {**kit.facts(["torch", "transformers"]), **result, "quality": [], "quality_of": ""}
    result["load"].append(f"{os.getloadavg()[0]:.0f}")
    kit.write("int8_rollout", result, TITLE, page_of(result), dry=options.quick)
    result["quality"] = int8_quality.measure(options.quality, make_ways()) if options.quality else []
    result["quality_of"] = Path(options.quality or "").name
    kit.write("int8_rollout", result, TITLE, page_of(result), dry=options.quick)


VERDICT = """\
int8 copies are small and save no time for rollouts on a processor with AVX2 and without VNNI; float16 saves
time. The native engine's kinds (`rollout.quantization`) follow from this; `rollout_precision.md` measures
them.

- Rounded weights with inputs as they are: the one kernel of torch that is vectorised here wants bfloat16
  inputs. A step of up to eight rows is 1.2 to 1.3 times as fast, one of sixteen rows and more is slower
  than float32. A generation of 64 or 128 rows gains nothing, even with float32 for the steps in which
  that is faster.
- Rounded weights and inputs are faster at every number of rows and make another policy of a real model,
  as inputs with outliers get seven bits. Importance weights cannot bridge so much (reasoned, not tried).
- float16 weights with float32 inputs are as fast as int8 weights up to eight rows, within the noise, and
  faster beyond, and leave the policy as good as unchanged. A generation of 64 rows of up to 512 tokens is
  about 1.3 times as fast; short ones gain little, as making the copy takes two seconds.

Measured on one kind of processor, with one thread. With AVX-512 VNNI or AMX torch has other kernels: run
this script there."""


if __name__ == "__main__":
    main()
