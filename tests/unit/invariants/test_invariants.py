"""Each property finds a fault that is planted for it, and formulas without a fault have all of them."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from invariants import cell
from planted_faults import EXACT, FAULTS, planted

from hybridflow.cli.main import main
from hybridflow.invariants.adapter import OPERATIONS, TrainerAdapter, load_adapter
from hybridflow.invariants.checking import Property, PropertyOutcome, try_all
from hybridflow.invariants.table import PROPERTIES, chosen, summaries

ALL = list(PROPERTIES.values())
DOCUMENTED = {("a_far_token_is_pulled_back", "k3")}
"""The estimate k3 is held at 10, as docs/invariants.md says."""


def failed(outcomes: list[PropertyOutcome]) -> set[tuple[str, str]]:
    return {(each.property, each.kind) for each in outcomes if each.status == "failed"}


def test_formulas_have_every_property() -> None:
    outcomes = list(try_all(EXACT, ALL))
    assert [each for each in outcomes if each.status != "held"] == []


@pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
def test_a_planted_fault_is_found(each: Property) -> None:
    outcomes = list(try_all(planted(each.name), [each]))
    assert {one.status for one in outcomes} >= {"failed"}, FAULTS[each.name][0]
    broken = next(one for one in outcomes if one.status == "failed")
    assert broken.given and broken.got and broken.wanted, "a failure shows its input"


def test_there_is_no_fault_without_a_property() -> None:
    assert FAULTS.keys() == PROPERTIES.keys()


def test_every_operation_has_a_property_and_every_property_its_words() -> None:
    assert {each.operation for each in ALL} == set(OPERATIONS)
    assert all(each.sentence.endswith(".") and each.source for each in ALL)


def test_our_own_numbers() -> None:
    outcomes = list(try_all(load_adapter("ours"), ALL))
    assert failed(outcomes) == DOCUMENTED, [each for each in outcomes if each.status == "failed"]
    assert not [each for each in outcomes if each.status == "not offered"]


def test_trl_is_asked_and_what_it_has_not_got_is_not_offered() -> None:
    pytest.importorskip("trl")
    found = {each.tried.name: each for each in summaries(try_all(load_adapter("trl"), ALL))}
    assert found["a_token_mean_does_not_depend_on_the_cut"].kinds("held") == ["ppo"]
    assert found["prompts_do_not_mix"].status == "held"
    assert found["the_critic_is_clipped_to_the_worse"].status == "not offered"


def test_the_page_has_every_function_with_its_arguments() -> None:
    page = (Path(__file__).parents[3] / "docs" / "invariants.md").read_text(encoding="utf-8")
    for name in OPERATIONS:
        words = []
        for each in inspect.signature(getattr(TrainerAdapter, name)).parameters.values():
            if each.kind is each.KEYWORD_ONLY and "*" not in words:
                words.append("*")
            words.append(each.name)
        assert f"`{name}({', '.join(words[1:])})`" in page


def test_a_cell_of_the_results_says_which_kinds_differ() -> None:
    outcomes = [
        {"property": "a", "kind": "k1", "status": "held"},
        {"property": "a", "kind": "k2", "status": "not offered"},
        {"property": "b", "kind": "", "status": "not offered"},
    ]
    assert (cell(outcomes, "a"), cell(outcomes, "b")) == ("yes", "–")
    outcomes.append({"property": "a", "kind": "k3", "status": "failed"})
    assert cell(outcomes, "a") == "yes: k1; no: k3"


ADAPTER = """
version = "mine 1"


def kl(name, log_prob, ref_log_prob, mask):
    if name == "k2":
        raise RuntimeError("boom")
    return log_prob - ref_log_prob if name == "k1" else NotImplemented


def entropy(logits):
    return 1.0
"""


def test_one_function_that_raises_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = tmp_path / "mine.py"
    file.write_text(ADAPTER)
    told = tmp_path / "told.json"
    assert main(["invariants", "--adapter", str(file), "--json", str(told)]) == 1
    data = json.loads(told.read_text())
    assert data["version"] == "mine 1"
    by_kind = {(each["property"], each["kind"]): each for each in data["outcomes"]}
    assert by_kind["equal_policies_have_no_kl", "k1"]["status"] == "held"
    assert by_kind["equal_policies_have_no_kl", "k2"]["got"] == "RuntimeError: boom"
    assert "log_prob=[[" in by_kind["equal_policies_have_no_kl", "k2"]["given"]
    assert by_kind["equal_policies_have_no_kl", "k3"]["status"] == "not offered"
    assert by_kind["gae_is_its_recursion", "gae"]["status"] == "not offered"
    assert by_kind["entropy_is_that_of_float64", ""]["status"] == "failed"
    out = capsys.readouterr().out
    assert "held: k1; failed: k2; not offered: k3" in out and out.count("got    RuntimeError: boom") == 1
    alike = [each["property"] for each in data["outcomes"] if each["got"] == "RuntimeError: boom"]
    said = f"{len(alike)} tries, of {len(set(alike))} properties, failed with RuntimeError: boom"
    assert len(alike) > 2 and f"\n{said}\n" in out


@pytest.mark.parametrize("end", ["sys.exit(0)", "raise Odd"])
def test_a_function_that_ends_the_process_has_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import sys\nclass Odd(Exception):\n    def __str__(self):\n        raise ValueError\n"
        f"def kl(name, log_prob, ref_log_prob, mask):\n    {end}\n"
    )
    assert main(["invariants", "--adapter", str(file), "--only", "equal_policies_have_no_kl"]) == 1
    assert "1 failed" in capsys.readouterr().out


def test_status_0_where_all_that_is_offered_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Adapter:\n    def packed_positions(self, lengths):\n        return [0, 1, 2, 0, 0, 1]\n"
    )
    assert main(["invariants", "--adapter", str(file), "--only", "packed_positions", "kl"]) == 0
    assert f"1 held, 0 failed, {len(chosen(['kl']))} not offered" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--adapter", "tlr"], "choose from ours, trl, verl, or give a file FILE.py"),
        (["--adapter", "missing.py"], "there is no such file"),
        (["--adapter", "broken.py"], "ZeroDivisionError while it was loaded"),
        (["--adapter", "empty.py"], "it has none of the functions advantages, policy_loss"),
        (["--only", "prompts_do_mix"], "there is prompts_do_not_mix"),
        (
            ["--adapter", "one.py", "--only", "whiten", "--json", "none/told.json"],
            "--json none/told.json cannot be written: No such file",
        ),
    ],
)
def test_what_cannot_be_tried_is_said(
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("1 / 0\n")
    Path("empty.py").write_text("")
    Path("one.py").write_text("def packed_positions(lengths): ...\n")
    assert main(["invariants", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_package_that_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    assert main(["invariants", "--adapter", "verl"]) == 1
    error = capsys.readouterr().err
    assert "--adapter verl: " in error and "put the package's folder into PYTHONPATH" in error


def test_properties_need_only_torch() -> None:
    code = (
        "import sys, hybridflow.invariants.table\n"
        "own = [name for name in sys.modules if name.startswith('hybridflow.')]\n"
        "print(*[name for name in own if not name.startswith('hybridflow.invariants')], end='|')\n"
        "print(*sorted({'transformers', 'trl', 'verl', 'ray', 'tensordict'} & set(sys.modules)), end='')"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "|"
