"""Published runs beside predictions: the proof of the cost model of `hybridflow plan`.

    python benchmarks/plan_check.py        (seconds, on one core)

published_runs.yaml ──read──► Run ──predict(run, Efficiency)──► seconds ──fit──► Efficiency
                                                                 └──compare──► within its bar, or missed

Writes `benchmarks/results/plan_check.md`, which is the same on every machine.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.costs import Costs, Efficiency, Lengths, StepRows
from hybridflow.planner.hardware import HARDWARE, Cluster
from hybridflow.planner.memory import RoleEngine
from hybridflow.planner.model_shape import shape_of

FILE = Path(__file__).parent / "published_runs.yaml"
RESULT = Path(__file__).parent / "results" / "plan_check.md"
FITTED_NAMES = ("mfu", "sparse_mfu", "decode_bandwidth", "decode_layer", "update")
"""The numbers of `Efficiency` that are fitted; the others are what kernels and collectives usually reach."""
EAGER_LAYER = 4.5e-4
"""Seconds of a layer in a decode step whose kernels the host launches one by one, not recorded as a graph."""
RATIO_BAR = 0.2
"""How far a predicted ratio of two modes may be from the published one."""

HEAD = """# Published runs beside predictions

`python benchmarks/plan_check.py`

The numbers of the cost model of `hybridflow plan` were fitted to rows 10, 11 (on-policy), 22 and 26, and to
no other row. Which costs the model has was decided with all published times known. A row that misses its bar
stands here as one that missed.

"""


@dataclass(frozen=True)
class Run:
    """One published measurement with its inputs: its own, then those of its source."""

    number: int
    label: str
    source: str
    inputs: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        assert name in self.inputs, f"row {self.number} of {FILE.name} has no {name}"
        return self.inputs[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return an input, or `default` where neither the row nor its source has it."""
        return self.inputs.get(name, default)

    @property
    def measured(self) -> float | None:
        """Published seconds of a step, or of a decode step; None where there are none."""
        if "rate" in self.inputs:
            return float(self["running"]) / float(self["rate"])
        seconds = self.get("seconds")
        return None if seconds is None else float(seconds)


@cache
def published() -> tuple[Run, ...]:
    """Return all rows of the file."""
    tree = yaml.safe_load(FILE.read_text())
    runs = []
    for row in tree["rows"]:
        source = tree["sources"][row["source"]]
        assumed = {name: each["value"] for name, each in source["assumed"].items()}
        inputs = {**assumed, **source["published"], **row}
        runs.append(Run(row["row"], row["label"], row["source"], inputs))
    return tuple(runs)


@cache
def sources() -> dict[str, dict[str, Any]]:
    """Return the sources of the file with their published and assumed values."""
    found: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["sources"]
    return found


def predict(run: Run, efficiency: Efficiency) -> float | None:
    """Return the predicted seconds of what a row measured; None for a row that cannot be predicted."""
    if run["kind"] == "none":
        return None
    cluster = Cluster(HARDWARE[run["hardware"]], int(run.get("devices", 1)))
    if run.get("eager"):
        efficiency = replace(efficiency, decode_layer=EAGER_LAYER)
    costs = Costs(cluster, efficiency)
    kinds: dict[str, Callable[[Run, Costs], float]] = {"step": _step, "train": _train, "decode": _decode}
    return kinds[run["kind"]](run, costs)


_lengths = cache(Lengths)  # a distribution finds its middle once


def _decode(run: Run, costs: Costs) -> float:
    return costs.decode_step(shape_of(run["model"]), float(run["running"]), float(run["context"]), 1)


def _engine(run: Run, devices: int, max_tokens: int, optimizer_steps: int) -> RoleEngine:
    tensor = int(run.get("tp", 1))
    pipeline = int(run.get("pp", 1))
    sequence = int(run.get("cp", 1))
    shards = max(devices // (tensor * pipeline), 1)
    experts = math.gcd(int(run.get("ep", 1)), shards * tensor)
    layout = ParallelLayout(dp_shard=shards, tp=tensor, pp=pipeline, cp=sequence, ep=experts)
    offloads = bool(run.get("offloads", False)) and not run.get("generating")
    return RoleEngine(
        "actor",
        layout,
        FSDPConfig(param_offload=offloads, reshard_after_forward=not run.get("megatron", False)),
        ModelConfig(
            enable_gradient_checkpointing=bool(run.get("recomputes", True)),
            lora_rank=int(run.get("lora", False)),
        ),
        max_tokens=max_tokens,
        optimizer_steps=optimizer_steps,
    )


def _train(run: Run, costs: Costs) -> float:
    length = int(run["length"])
    devices = costs.cluster.devices
    count = float(run.get("batch", devices))
    rows = StepRows(count, 0.0, Lengths(length, length))
    return costs.passes(shape_of(run["model"]), rows, _engine(run, devices, length, 1), learns=True)


def _step(run: Run, costs: Costs) -> float:
    """Return the seconds of a step: its phases one after another, or beside each other as its mode has it."""
    shape = shape_of(run["model"])
    prompt = float(run["prompt"])
    response = float(run["tokens"]) - prompt if run.get("tokens") else float(run["response"])
    lengths = _lengths(response, float(run["limit"]), float(run["spread"]))
    rows = StepRows(float(run["rows"]), prompt, lengths, int(run.get("group", 16)))
    mode = run.get("mode", "sync")
    generating = int(run.get("generating", 0))
    devices = costs.cluster.devices
    trainers = devices - generating
    max_tokens = int(run.get("max_tokens", run["limit"]))
    engine = _engine(run, trainers, max_tokens, int(run["optimizer_steps"]))
    passes = int(run.get("passes", 1))
    working = passes * costs.passes(shape, rows, engine, learns=False)
    working += costs.passes(shape, rows, engine, learns=True)
    if run.get("critic"):
        working += costs.passes(shape, rows, engine, learns=False)
        working += costs.passes(shape, rows, engine, learns=True)
    tensor = int(run.get("tensor", 1))
    refilled = mode in ("fully_async", "colocated_async", "lent")
    making = costs.generation(shape, rows, generating or devices, tensor, 256, refilled=refilled)
    received_by = 1 if run.get("whole") else tensor  # each rank receives all of the model, or its slice
    sync = costs.sync(shape, trainers, received_by, apart=bool(generating))
    if mode == "lent":  # trainers that wait generate too
        return max((making * generating + working * trainers) / devices, working) + sync
    if generating:
        return max(making, working) + sync
    return making + working + sync


def fit(begin: Efficiency, names: Sequence[str] = FITTED_NAMES) -> Efficiency:
    """Return the numbers that bring the fitted rows closest to what was published.

    It minimises the sum of squared logarithms of predicted over published, one number at a time with steps
    that shrink: deterministic, and enough for five numbers.
    """
    runs = [run for run in published() if run.get("fitted")]

    def loss(efficiency: Efficiency) -> float:
        total = 0.0
        for run in runs:
            seconds = predict(run, efficiency)
            assert seconds is not None and run.measured is not None, "a fitted row has both"
            total += math.log(seconds / run.measured) ** 2
        return total

    best = begin
    least = loss(best)
    step = 0.3
    while step > 1e-3:
        before = least
        for name in names:
            for factor in (1 + step, 1 / (1 + step)):
                value = getattr(best, name) * factor
                if name not in ("decode_layer", "update"):
                    value = min(value, 0.92)  # a part of a peak
                other = replace(best, **{name: value})
                if (found := loss(other)) < least:
                    best = other
                    least = found
        if before - least < 1e-6:
            step /= 2
    return best


@dataclass(frozen=True)
class Compared:
    """A row with its prediction, and what the check says of it."""

    run: Run
    predicted: float | None
    verdict: str

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1."""
        if self.predicted is None or self.run.measured is None:
            return None
        return self.predicted / self.run.measured - 1


@dataclass(frozen=True)
class Ratio:
    """Two modes of one run: published and predicted ratio of their steps."""

    first: Run
    second: Run
    published: float
    predicted: float

    @property
    def verdict(self) -> str:
        """The result of the check: the ratios are within the bar, and the same mode is the faster one."""
        if (self.published > 1) != (self.predicted > 1):
            return "missed, and the order too"
        return "within" if abs(self.predicted / self.published - 1) <= RATIO_BAR else "missed"


def compare(efficiency: Efficiency) -> list[Compared]:
    """Return every row beside its prediction."""
    found = []
    for run in published():
        seconds = predict(run, efficiency)
        compared = Compared(run, seconds, "")
        found.append(replace(compared, verdict=_verdict(compared)))
    return found


def _verdict(compared: Compared) -> str:
    run = compared.run
    if compared.predicted is None:
        return f"not predicted: {run['why']}"
    if run.get("fitted"):
        return "fitted"
    if run.get("modes"):
        return "by its ratio, below"
    if "bar" not in run.inputs:
        return "no bar"
    error = compared.error
    assert error is not None, "a row with a bar has a published time"
    return "within" if abs(error) <= run["bar"] else "missed"


def ratios(compared: Sequence[Compared]) -> Iterator[Ratio]:
    """Yield the ratio of the first mode of each group to each other one."""
    first: dict[str, Compared] = {}
    for each in compared:
        group = each.run.get("modes")
        if group is None:
            continue
        begin = first.setdefault(group, each)
        if begin is each:
            continue
        one = (begin.run.measured, each.run.measured, begin.predicted, each.predicted)
        a, b, c, d = (value or math.nan for value in one)
        yield Ratio(begin.run, each.run, a / b, c / d)


def check_page() -> str:
    """Return the whole page; it is the same on every machine."""
    efficiency = fit(Efficiency())
    compared = compare(efficiency)
    modes = list(ratios(compared))
    parts = [HEAD + _summary(efficiency, compared, modes), *_rows(compared), *_ratios(modes), *_inputs()]
    return "\n".join(parts)


def _summary(efficiency: Efficiency, compared: Sequence[Compared], modes: Sequence[Ratio]) -> str:
    fitted = [run for run in published() if run.get("fitted")]
    judged = [each for each in compared if each.verdict in ("within", "missed")]
    met = sum(each.verdict == "within" for each in judged)
    within = sum(ratio.verdict == "within" for ratio in modes)
    ordered = sum((ratio.published > 1) == (ratio.predicted > 1) for ratio in modes)
    marks = [each for source in sources().values() for each in source["assumed"].values()]
    inferred = sum(bool(each.get("inferred")) for each in marks)
    numbers = ", ".join(f"{name} {getattr(efficiency, name):.3g}" for name in FITTED_NAMES)
    names = len(FITTED_NAMES)
    return f"""- {names} numbers were fitted to {len(fitted)} measurements: {numbers}.
- {len(marks)} inputs are assumed, each for all rows of its source. {inferred} of them were inferred from
  published seconds of the same source, so they are as good as fitted.
- Of {len(judged)} rows with a bar, {met} are within it and {len(judged) - met} missed.
- Of {len(modes)} ratios of modes, {within} are within {RATIO_BAR:.0%} and {len(modes) - within} missed. The
  faster mode is the right one in {ordered}.
"""


def _rows(compared: Sequence[Compared]) -> Iterator[str]:
    yield "| row | run | devices | published | predicted | error | bar | |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in compared:
        run = each.run
        devices = "–"
        if run["kind"] != "none":
            devices = f"{run.get('devices', 1)} {run['hardware']}"
        error = "–" if each.error is None else f"{each.error:+.0%}"
        bar = f"{run['bar']:.0%}" if "bar" in run.inputs else "–"
        yield (
            f"| {run.number} | {run.label} | {devices} | {_seconds(run.measured)} | "
            f"{_seconds(each.predicted)} | {error} | {bar} | {each.verdict} |"
        )


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.4g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _ratios(modes: Sequence[Ratio]) -> Iterator[str]:
    yield "\n## Ratios of modes\n"
    yield f"The step of the first mode over that of the other; the bar is {RATIO_BAR:.0%}.\n"
    yield "| row | first | other | published | predicted | |"
    yield "|---|---|---|---|---|---|"
    for ratio in modes:
        yield (
            f"| {ratio.first.number} | {ratio.first.label} | {ratio.second.label} | {ratio.published:.2f} | "
            f"{ratio.predicted:.2f} | {ratio.verdict} |"
        )


def _inputs() -> Iterator[str]:
    yield "\n## Assumed inputs\n"
    yield "What the pages do not say. All else is published, in `benchmarks/published_runs.yaml`.\n"
    yield "| source | input | value | why |"
    yield "|---|---|---|---|"
    for source in sources().values():
        for name, each in source["assumed"].items():
            yield f"| {source['page']} | {name} | {each['value']} | {each['why']} |"


def main() -> int:
    """Write the page."""
    RESULT.write_text(check_page() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
