"""How the demo's result is shown: accuracies before and after, five answers of each."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text


def show_summary(summary: dict[str, Any]) -> None:
    """Print the closing tables and where everything is."""
    console = Console()
    table = Table(
        "held-out questions",
        "before RL",
        "after RL",
        "change",
        title=f"{summary['algorithm'].upper()}, seed {summary['seed']}",
    )
    for name in ("greedy", "sampled"):
        before, after = summary[f"{name}_before"], summary[f"{name}_after"]
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
            mark = (
                Text("right", style="green")
                if sample["score"]
                else Text(f"wrong, {sample['ground_truth']}", style="red")
            )
            answers.add_row(Text(str(sample["question"])), Text(str(sample["response"])), mark)
        console.print(answers)
    console.print(
        f"{summary['sft_steps']} warm-up steps in {summary['seconds_sft']:.0f} s, "
        f"reinforcement learning {summary['seconds_rl']:.0f} s, {summary['seconds']:.0f} s in all."
    )
    console.print(Text(f"Curves and samples: {summary['report']}"))
