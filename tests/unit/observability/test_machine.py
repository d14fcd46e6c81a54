"""The facts of a machine: its cards are named where a run has some, and none is made up where it has not."""

from __future__ import annotations

from typing import Any

import pytest

from hybridflow.observability import machine
from hybridflow.observability.machine import machine_facts


class Cards:
    """The facilities of a device of which this process sees two."""

    def cards(self) -> list[dict[str, Any]]:
        return [{"name": "NVIDIA H100 80GB HBM3", "bytes": 2**36, "major": 9}] * 2


def test_a_run_on_a_cpu_names_no_card() -> None:
    facts = machine_facts()
    assert {"cpu", "threads", "torch"} <= facts.keys() and not {"card", "cards"} & facts.keys()


def test_a_run_on_cards_names_them_and_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "facilities", {"cuda": Cards()}.__getitem__)
    facts = machine_facts("cuda")
    assert (facts["card"], facts["cards"]) == ("NVIDIA H100 80GB HBM3", 2)
