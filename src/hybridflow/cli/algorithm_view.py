"""The output of `hybridflow explain`: the formulas of a run in the order of its step."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hybridflow.config import PPOConfig
from hybridflow.explain.algorithm import explain_algorithm
from hybridflow.explain.formula import Formula

INDENT = 3
DEEPER = 5


def show_algorithm(config: PPOConfig) -> None:
    """Print each part of a step: equations, the same with numbers, keys, papers and places in the code."""
    console = Console()
    for number, section in enumerate(explain_algorithm(config), start=1):
        _line(console, f"{number}. {section.title}", 0, "bold")
        for line in section.lines:
            _line(console, line, INDENT)
        for formula in section.formulas:
            _show(console, formula)
        console.print()


def _show(console: Console, formula: Formula) -> None:
    _line(console, formula.signature or formula.name, INDENT, "bold cyan")
    _line(console, formula.equation, DEEPER)
    if formula.with_numbers:
        _line(console, "with this run's numbers:", DEEPER, "dim")
        _line(console, formula.with_numbers, DEEPER, "green")
    for number in formula.numbers:
        where = ": ".join(text for text in (number.key, number.meaning) if text)
        _line(console, f"{number.label} = {number.shown}   ({where})", DEEPER)
    for note in formula.notes:
        _line(console, note, DEEPER)
    _line(
        console,
        "   ".join(("code " + formula.place, *(f"source {address}" for address in formula.sources))),
        DEEPER,
        "dim",
    )


def _line(console: Console, text: str, indent: int, style: str = "") -> None:
    """Print one line, folded to the window under its indent; whole where the output is no terminal."""
    if console.is_terminal:
        console.print(Padding(Text(text, style=style), (0, 0, 0, indent)))
    else:
        console.print(Text(" " * indent + text), soft_wrap=True)
