"""Each key that shapes training moves a number of a run, is refused, or is told not to be read, in each run
that it is tried in; and the probe finds a key that does nothing, and a coefficient that reaches no loss.
"""

from __future__ import annotations

from collections import defaultdict
from fnmatch import fnmatch
from typing import Any

import pytest
from keys_that_move import TARGET, Bench, Cell, faults, trained_keys, verdicts
from keys_that_move_tables import ACTOR, NOTHING, SHARED, TRIALS
from torch import Tensor

from hybridflow.config import DPOConfig, PPOConfig
from hybridflow.config.tree import keys_of

BLOCKS: dict[tuple[Any, str], list[str]] = defaultdict(list)
for root in (PPOConfig, DPOConfig):
    for path in trained_keys(root):
        BLOCKS[root, path.rpartition(".")[0]].append(path)


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Bench]:
    folder = tmp_path_factory.mktemp("keys")
    return {root: Bench(folder, root) for root in (PPOConfig, DPOConfig)}


@pytest.fixture
def bench(benches: dict[Any, Bench]) -> Bench:
    return benches[PPOConfig]


OF_BLOCKS = pytest.mark.parametrize(
    ("root", "block"), BLOCKS, ids=[f"{root.__name__}-{block}" for root, block in BLOCKS]
)


@OF_BLOCKS
def test_no_key_is_silent_in_the_base_run_and_in_the_last_of_those_that_it_acts_in(
    benches: dict[Any, Bench], root: Any, block: str
) -> None:
    bench = benches[root]
    silent = []
    for path in BLOCKS[root, block]:
        cells = list(bench.cells(trained_keys(root)[path]))
        silent += [cell for cell in (cells[0], cells[-1]) if bench.verdict(cell).kind == "silent"]
    assert silent == []


@pytest.mark.slow
@OF_BLOCKS
def test_each_key_moves_something_and_is_silent_in_no_run(
    benches: dict[Any, Bench], root: Any, block: str
) -> None:
    assert faults(verdicts(benches[root], BLOCKS[root, block])) == []


def test_a_key_that_shapes_nothing_is_silent(bench: Bench) -> None:
    assert bench.verdict(Cell("trainer.experiment_name", "another", {}, {})).kind == "silent"


def test_a_coefficient_that_reaches_no_loss_is_found(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(log_prob: Tensor, *others: Any) -> Tensor:
        return log_prob.sum() * 0.0

    cell = Cell(f"{ACTOR}.positive_lm_loss_coef", 0.7, {}, {})
    with monkeypatch.context() as patched:
        patched.setattr("hybridflow.workers.losses.positive_example_loss", lost)
        assert bench.verdict(cell).kind == "silent", "a metric that is new and 0 is no move"
    bench.forget(cell)
    verdict = bench.verdict(cell)
    assert verdict.kind == "moved" and {"loss", "gradient", "weights"} <= set(verdict.text.split(", "))


def test_tables_name_keys_that_there_are() -> None:
    keys = {*keys_of(PPOConfig), *keys_of(DPOConfig)}
    assert [path for path in TRIALS if path not in keys] == []
    assert [end for end in SHARED if not any(path.endswith(f".{end}") for path in keys)] == []
    assert [pattern for pattern in NOTHING if not any(fnmatch(path, pattern) for path in keys)] == []


def test_the_page_has_each_key_that_is_tried() -> None:
    text = TARGET.read_text(encoding="utf-8")
    tried = {*trained_keys(PPOConfig), *trained_keys(DPOConfig)}
    missing = [path for path in sorted(tried) if f"| `{path}` |" not in text]
    assert not missing, "run python benchmarks/keys_that_move.py --before CHECKOUT"
