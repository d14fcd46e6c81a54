"""The output of `hybridflow config --explain`: what follows from a configuration."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.explain import Line
from hybridflow.config.preference import items_per_row
from hybridflow.data.files import count_rows, load_rows
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
