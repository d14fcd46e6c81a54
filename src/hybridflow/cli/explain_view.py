"""The output of `hybridflow config --explain`, what follows from a configuration, and that of `hybridflow
explain`, the formulas of a run in the order of its step.
"""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import Line
from hybridflow.config.preference import items_per_row
from hybridflow.data.files import count_rows, load_rows
from hybridflow.explain.algorithm import explain_algorithm
from hybridflow.explain.formula import Formula
from hybridflow.explain.run import explain_run


def show_explanation(config: PPOConfig | SFTConfig) -> None:
    """Print a run's sizes, steps and processes, and the memory of models that are on this machine."""
    rows = training_rows(config)
    batch = config.data.train_batch_size
    columns = None
    if rows is not None and items_per_row(config) > 1:
        columns = load_rows(config.data.train_files).columns
    lines = explain_run(config, rows, columns)
    if rows is not None and rows * items_per_row(config, columns) < batch:
        lines.insert(
            0,
            Line(
                "cannot run",
                f"{rows} training rows",
                f"fewer than data.train_batch_size={batch}: lower it, or add data",
            ),
        )
    console = Console()
    if not console.is_terminal:  # a line for each, whole: no name of a key is broken in a file
        for line in lines:
            console.print(Text(f"{line.label}: {line.value} ({line.how})"), soft_wrap=True)
        return
    table = Table("", title="What follows from this configuration", title_justify="left")
    table.add_column("", justify="right")
    table.add_column("because", overflow="fold")
    for line in lines:
        table.add_row(Text(line.label), Text(line.value), Text(line.how))
    console.print(table)


def training_rows(config: PPOConfig | SFTConfig) -> int | None:
    """Return the training rows before any is left out; None where they would have to be fetched or made."""
    own_class = isinstance(config, PPOConfig) and config.data.custom_cls.path
    if config.data.task.name or own_class or not config.data.train_files:
        return None
    return count_rows(config.data.train_files)


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
