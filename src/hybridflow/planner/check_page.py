"""The page of `hybridflow plan --check`, in Markdown: published runs beside predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybridflow.planner.check import (
    FITTED_NAMES,
    RATIO_BAR,
    Compared,
    Ratio,
    compare,
    fit,
    published,
    ratios,
    sources,
)
from hybridflow.planner.costs import Efficiency

HEAD = """# Published runs beside predictions

`hybridflow plan --check`

The numbers of the cost model of `hybridflow plan` were fitted to rows 10, 11 (on-policy), 22 and 26, and to
no other row. Which costs the model has was decided with all published times known. A row that misses its bar
stands here as one that missed.

"""


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
    yield "What the pages do not say. All else is published, in `src/hybridflow/planner/published.yaml`.\n"
    yield "| source | input | value | why |"
    yield "|---|---|---|---|"
    for source in sources().values():
        for name, each in source["assumed"].items():
            yield f"| {source['page']} | {name} | {each['value']} | {each['why']} |"
