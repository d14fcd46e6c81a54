"""The glossary of metrics: every entry is whole, its page is fresh, and what it says of its readers is so."""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from hybridflow.observability import report
from hybridflow.observability.advice import ALARMS, HINTS, History
from hybridflow.observability.glossary import PLACEHOLDERS, Better, Feed, MetricEntry, find, glossary
from hybridflow.observability.timing import WORDS
from hybridflow.observability.trackers.console import FIELDS

ENTRIES = [entry for entries in glossary().values() for entry in entries]
EXAMPLES = {
    "role": ("actor", "critic", "process_reward", "train"),
    "stat": ("mean", "max", "min"),
    "cause": ("deadline",),
    "kind": ("ValueError",),
    "section": ("gen", "step"),
    "source": ("openai/gsm8k",),
    "variable": ("acc", "reward"),
    "n": ("8",),
    "k": ("4",),
    "age": ("0", "2"),
    "name": ("mine",),
}


def names_of(entry: MetricEntry) -> Iterator[str]:
    """Yield metrics that the entry stands for."""
    parts = re.split(r"\{(\w+)\}", entry.name)
    for chosen in itertools.product(*(EXAMPLES[placeholder] for placeholder in parts[1::2])):
        yield "".join(text for pair in zip(parts[0::2], [*chosen, ""]) for text in pair)


def test_entries_are_whole() -> None:
    for entry in ENTRIES:
        assert re.fullmatch(r"\S[^|]+\.", entry.meaning), entry
        assert re.fullmatch(r"[^|\s][^|]*", entry.unit), entry
        assert entry.better in get_args(Better), entry
        assert {*entry.feeds} <= {*get_args(Feed)}, entry
        assert {*re.findall(r"\{(\w*)\}", entry.name)} <= PLACEHOLDERS.keys(), entry


def test_metrics_find_their_entry() -> None:
    for entry in ENTRIES:
        for name in names_of(entry):
            found = find(name)
            assert found is not None, name
            # names of an evaluation look like those of a validation whose source has a slash in its name
            assert found is entry or (found.better, found.unit) == (entry.better, entry.unit), name


def test_names_differ_and_others_are_unknown() -> None:
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    for name in ("actor", "actor/pg_los", "critic/score", "critic/score/median", "teacher/lr", "agent/a/b"):
        assert find(name) is None, name


def test_agents_metrics_of_a_validation_are_those_of_training() -> None:
    assert find("val-aux/agent/num_turns/mean") is find("agent/num_turns/mean") is not None


def readers_differ(feed: Feed, reads: Callable[[str], bool]) -> list[str]:
    """Return the entries of which the table says otherwise than `reads` whether `feed` reads them."""
    return [
        entry.name
        for entry in ENTRIES
        if (feed in entry.feeds) != any(reads(name) for name in names_of(entry))
    ]


def test_the_line_of_a_step_shows_what_the_table_says() -> None:
    shown = {name for field in FIELDS for name in field.names}
    assert not readers_differ("line", shown.__contains__)


def test_the_line_shows_known_metrics_only() -> None:
    assert all(find(name) for field in FIELDS for name in field.names)


def test_the_report_shows_what_the_table_says() -> None:
    source = (Path(report.__file__).parent / "assets" / "overview.js").read_text(encoding="utf-8")
    cards = [pattern.replace("\\/", "/") for pattern in re.findall(r"match: /(.*?[^\\])/[,} ]", source)]
    assert len(cards) == source.count("match: /")
    assert not readers_differ("report", lambda name: any(re.search(card, name) for card in cards))


class Asked(dict[str, float]):
    """Metrics that note which of them are asked for."""

    def __init__(self, values: dict[str, float]) -> None:
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def test_health_reads_what_the_table_says() -> None:
    asked = Asked({})
    prefixes = []

    class Empty(History):
        def change(self, name: str) -> None:
            asked.get(name)

        recent = change

        def total(self, prefix: str) -> float:
            prefixes.append(prefix)
            return 0.0

    run = Empty()
    run.now = asked
    assert not any(next(rule(run), None) for rule in (*ALARMS, *HINTS))
    assert "actor/entropy" in asked.names and prefixes

    def reads(name: str) -> bool:
        run = History()
        run.add({name: 1.0}, 1)
        through_all = bool(run.validations) or name.endswith("/num_skipped_steps")
        return name in asked.names or name.startswith(tuple(prefixes)) or through_all

    assert not readers_differ("health", reads)


def test_the_watch_reads_what_the_table_says() -> None:
    def reads(name: str) -> bool:
        of_validation = name.startswith("val-core/") and "/mean@" in name
        return name.startswith("reward_watch/") or name == "critic/score/mean" or of_validation

    assert not readers_differ("reward watch", reads)


def test_every_section_with_words_is_a_metric_of_time() -> None:
    assert all(find(f"timing_s/{section}") for section in WORDS)


def test_the_page_is_what_the_script_writes() -> None:
    root = Path(__file__).parents[3]
    spec = importlib.util.spec_from_file_location("metric_docs", root / "scripts" / "metric_docs.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.main(["--check"]) == 0, "run python scripts/metric_docs.py"
    page = script.render()
    assert all(f"| `{entry.name}` | {entry.meaning} | {entry.unit} |" in page for entry in ENTRIES)
