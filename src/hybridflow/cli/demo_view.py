"""The demo's result on the terminal: accuracies before and after, and five answers of each."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_summary(summary: dict[str, Any]) -> None:
    """Print the closing tables, the times, the machine, and where the report is."""
    console = Console()
    table = Table(
        "held-out questions",
        "before RL",
        "after RL",
        "change",
        title=f"{summary['algorithm'].upper()}, seed {summary['seed']}",
    )
    for name in ("greedy", "sampled"):
        before = summary[f"{name}_before"]
        after = summary[f"{name}_after"]
        table.add_row(
            f"{name} accuracy ({summary['num_questions']})",
            f"{before:.3f}",
            f"{after:.3f}",
            f"{after - before:+.3f}",
        )
    console.print(table)
    for when in ("before", "after"):
        answers = Table(
            "question",
            "answer",
            "",
            title=f"Sampled answers {when} reinforcement learning",
            title_justify="left",
        )
        for sample in summary[f"samples_{when}"]:
            mark = Text(f"wrong, {sample['ground_truth']}", style="red")
            if sample["score"]:
                mark = Text("right", style="green")
            answers.add_row(Text(str(sample["question"])), Text(str(sample["response"])), mark)
        console.print(answers)
    console.print(
        f"{summary['sft_steps']} warm-up steps in {summary['seconds_sft']:.0f} s, "
        f"reinforcement learning {summary['seconds_rl']:.0f} s, {summary['seconds']:.0f} s in all."
    )
    threads = summary["threads"]
    console.print(
        Text(
            f"Computed by {summary['cpu']} with {threads} thread{'s' * (threads != 1)} and torch "
            f"{summary['torch']}; another kind of CPU gives other figures."
        )
    )
    console.print(Text(f"Curves and samples: {summary['report']}"))
