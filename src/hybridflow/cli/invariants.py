"""`hybridflow invariants`: which properties the numbers of a trainer have, and inputs where not."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridflow.errors import ConfigError

SHOWN = 600
"""Characters of an input or a result in the output; the file of --json has all."""


def add_invariants(words: Any) -> None:
    """Add the grammar of the command."""
    command = words.add_parser(
        "invariants",
        help="try which properties the numbers of a trainer have: ours, TRL's, verl's or your own",
    )
    command.add_argument(
        "--adapter",
        default="ours",
        metavar="NAME",
        help="ours, trl, verl, or a file FILE.py with your trainer's functions (default: %(default)s)",
    )
    command.add_argument(
        "--only", nargs="+", metavar="NAME", help="properties by name, or all of an operation, such as kl"
    )
    command.add_argument("--json", metavar="FILE", help="also write what came of each as JSON")
    command.set_defaults(body=invariants)


def invariants(options: argparse.Namespace) -> int:
    """Print what came of each property; status 1 where one failed."""
    from hybridflow.invariants.adapter import AdapterError, load_adapter
    from hybridflow.invariants.checking import NO_ERROR, try_all
    from hybridflow.invariants.table import chosen, summaries
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    try:
        properties = chosen(options.only)
        with progress.shown(), progress.importing(options.adapter):
            adapter = load_adapter(options.adapter)
    except AdapterError as error:
        raise ConfigError(str(error)) from error
    found = summaries(try_all(adapter, properties))

    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    console = Console()
    version = getattr(adapter, "version", "")
    table = Table(
        Column("property", overflow="fold"),
        "result",
        "what it says",
        title=f"{options.adapter} {version}",
        title_justify="left",
    )
    for each in found:
        style = {"failed": "red", "held": "green"}.get(each.status, "dim")
        table.add_row(Text(each.tried.name), Text(each.text, style=style), Text(each.tried.sentence))
    console.print(table)
    failures = [
        (outcome, each.tried.source)
        for each in found
        for outcome in each.outcomes
        if outcome.status == "failed"
    ]
    raised: dict[str, list[str]] = {}
    for outcome, source in failures:
        alike = raised.setdefault(outcome.got, []) if outcome.wanted == NO_ERROR else []
        if not alike:
            console.print(Text(_failure(outcome, source)), soft_wrap=True)
        alike.append(outcome.property)
    for got, names in raised.items():
        if len(names) > 1:
            text = f"{len(names)} tries, of {len(set(names))} properties, failed with {got[:SHOWN]}"
            console.print(Text(text), soft_wrap=True)
    counts = {
        status: sum(each.status == status for each in found) for status in ("held", "failed", "not offered")
    }
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    if options.json:
        data = {"adapter": options.adapter, "version": version, **counts}
        outcomes = [asdict(outcome) for each in found for outcome in each.outcomes]
        text = json.dumps({**data, "outcomes": outcomes}, indent=1)
        try:
            Path(options.json).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--json {options.json} cannot be written: {error.strerror}") from error
    return int(counts["failed"] > 0)


def _failure(outcome: Any, source: str) -> str:
    """Return the lines that say how a property failed."""
    name = f"{outcome.property} {outcome.kind}".strip()
    texts = {"input ": outcome.given, "got   ": outcome.got, "wanted": outcome.wanted}
    lines = [f"  {word} {text[:SHOWN]}{'…' if len(text) > SHOWN else ''}" for word, text in texts.items()]
    return "\n".join([f"{name} ({source})", *lines])
