"""Which families of models can do what here, as tiny random models against transformers, on a CPU.

    python benchmarks/families.py   # writes benchmarks/results/families.md; two minutes

What is measured is what `tests/unit/models/test_families.py` holds.
"""

from __future__ import annotations

import datetime
import re
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "models")]

import torch  # noqa: E402
import transformers  # noqa: E402
from side_by_side import machine  # noqa: E402
from tiny_families import (  # noqa: E402
    FAMILIES,
    REFUSED,
    SPREADS,
    Family,
    Measured,
    adapters,
    exact_problem,
    generated,
    gradients_apart,
    in_stages,
    packed_apart,
    read_back,
    refusal,
    refused,
    shared_apart,
    spread,
)

from ranks import Ranks  # noqa: E402

PAGE = ROOT / "benchmarks" / "results" / "families.md"
VLLM = ROOT / ".venv-vllm"
"""vLLM's environment, whose table of architectures is read as text where it is there."""
NOTES: dict[str, str] = {
    "its experts are not cut": "experts are not cut; in training `expert_parallel_size` shares them",
    "publishes no plan": "transformers publishes no plan of tensor parallelism for it",
    "mla_kv_a_proj": "transformers' plan for it has a style that is not implemented",
    "has no experts": "it has no experts",
}
"""What a refusal comes down to, by a part of its message."""


class Footnotes:
    """Numbers of reasons, in the order in which they are first met."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def cell(self, found: Measured) -> str:
        """Return a difference as text, or `no` with the number of the reason."""
        if isinstance(found, float):
            return "0" if found == 0 else f"{found:.0e}"
        reason = next((text for part, text in NOTES.items() if part in found), found)
        if reason not in self.told:
            self.told.append(reason)
        return f"no ({self.told.index(reason) + 1})"


def main() -> None:
    """Measure all families and write the page."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    notes = Footnotes()
    ranks = Ranks(2)
    try:
        one = [one_process(name, family, notes) for name, family in FAMILIES.items()]
        two = [two_processes(name, family, ranks, notes) for name, family in FAMILIES.items()]
    finally:
        ranks.stop()
    PAGE.write_text(page(one, two, notes) + "\n")
    print(f"wrote {PAGE.relative_to(ROOT)}")


def one_process(name: str, family: Family, notes: Footnotes) -> list[str]:
    """Return the row of a family in one process."""
    print(name, flush=True)
    made = generated(family)
    adapted, folded = adapters(family)
    with tempfile.TemporaryDirectory() as folder:
        tensors = read_back(family, Path(folder))
    problem = exact_problem(family)
    return [
        name,
        f"`{family.model_type}`",
        notes.cell(packed_apart(family, torch.float32)),
        notes.cell(packed_apart(family, torch.float64)),
        notes.cell(gradients_apart(family)),
        notes.cell(shared_apart(family)),
        f"{made.same_tokens} of {made.tokens}",
        notes.cell(made.apart),
        "no: " + problem if problem else "yes",
        f"{adapted} layers, {folded:.0e}",
        f"all {tensors}",
    ]


def two_processes(name: str, family: Family, ranks: Ranks, notes: Footnotes) -> list[str]:
    """Return the row of a family on two ranks."""
    print(f"{name} on two ranks", flush=True)
    found = [spread(ranks, how, family) for how in SPREADS]
    staged = refusal(in_stages, family)
    return [
        name,
        *map(notes.cell, found),
        "same bits" if staged == 0.0 else notes.cell(staged),
        listed(family),
    ]


def listed(family: Family) -> str:
    """Return whether vLLM's table of architectures names that of a family."""
    tables = list(VLLM.glob("lib/python3*/site-packages/vllm/model_executor/models/registry.py"))
    if not tables:
        return "not looked up"
    name = type(family.hf()).__name__
    return "yes" if f'"{name}"' in tables[0].read_text() else "no"


def vllm_version() -> str:
    """Return the version of vLLM in its environment, or an empty text."""
    found = [
        re.search(r"vllm(?:_cpu)?-([\d.]+)\.dist-info", str(path)) for path in VLLM.rglob("vllm*.dist-info")
    ]
    return next((match[1] for match in found if match), "")


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return a table of Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def page(one: list[list[str]], two: list[list[str]], notes: Footnotes) -> str:
    """Return the whole page."""
    with_vllm = f"vLLM {vllm_version()} lists it".replace("  ", " ")
    lines = [
        "# Families of models",
        "",
        f"{datetime.date.today()} · `python benchmarks/families.py` · {machine()} · transformers "
        f"{version('transformers')}, torch {torch.__version__.partition('+')[0]}",
        "",
        "Written by benchmarks/families.py; do not edit. Tiny random models of each architecture, two layers "
        "of width 32, on one thread. Rows have 3 to 30 tokens, so windows of four tokens are crossed, and "
        "Llama 3's positions pass the length that its rotary scaling starts from. "
        "`tests/unit/models/test_families.py` holds the same measurements.",
        "",
        "## In one process",
        "",
        "Differences are from transformers' own forward with its eager attention, each row alone, in nats; "
        "of gradients relative to the largest one.",
        "",
        *table(
            [
                "family",
                "model_type",
                "packed rows, float32",
                "float64",
                "gradients, float64",
                "shared prompts, float64",
                "greedy tokens as transformers'",
                "their log-probs, float32",
                "exact mode",
                "LoRA: adapted; folded, float32",
                "tensors read back with the same bits",
            ],
            one,
        ),
        "",
        "## On two ranks",
        "",
        "The worse difference of log-probs (nats) and of gradients (relative) from one process, in float64; "
        "for generation of log-probs alone. Two stages are compared with the whole model to the bit.",
        "",
        *table(["family", *SPREADS, "two stages", with_vllm], two),
        "",
        *[f"({number + 1}) {reason}.  " for number, reason in enumerate(notes.told)],
        "",
        "vLLM's column is read from its table of architectures; nothing was generated with it for this page.",
        "",
        "## Refused",
        "",
        "These are refused when the model is loaded: by their configuration before weights are read, or by "
        "the probe that compares packed rows with transformers.",
        "",
        *table(
            ["family", "model_type", "message"],
            [[name, f"`{each.model_type}`", refused(each)] for name, each in REFUSED.items()],
        ),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
