"""The table of engines and features: its tests exist, its page is fresh, what is lacking is refused."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.checks.rollout import asked_features
from hybridflow.config.engine_features import ENGINES, FEATURES, TABLE
from hybridflow.config.load import load_config
from hybridflow.config.root import PPOConfig

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS.parent / "scripts"), str(TESTS / "conformance")]
import engine_docs  # noqa: E402
from shown_by import SHOWN_BY, shown_by  # noqa: E402


@cache
def functions(file: Path) -> dict[str, str]:
    """Source of each function of a file."""
    text = file.read_text(encoding="utf-8")
    return {
        node.name: ast.get_source_segment(text, node) or ""
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef)
    }


def test_each_cell_is_there_and_each_yes_has_its_test() -> None:
    assert set(TABLE) == set(ENGINES)
    for name, column in TABLE.items():
        assert list(column) == list(FEATURES), name
        for feature, cell in column.items():
            test = shown_by(name, feature)
            assert test or cell.note, f"{name}, {feature}: say why not"
            if test:
                path, _, function = test.partition("::")
                assert function in functions(TESTS / path), f"{name}, {feature}: there is no {test}"
    for feature, test in SHOWN_BY.items():
        path, _, function = test.partition("::")
        asks = "subject.needs(" in functions(TESTS / path)[function]
        assert asks or feature == "sleep", f"{test} does not ask whether the engine has {feature}"


def test_engines_that_train_are_the_values_of_the_key() -> None:
    kinds = get_args(get_type_hints(RolloutConfig)["name"])
    assert set(kinds) == {name for name, engine in ENGINES.items() if engine.trains}
    assert all(not TABLE[name]["weight_updates"].has for name, engine in ENGINES.items() if not engine.trains)


def test_the_page_is_fresh() -> None:
    assert engine_docs.main(["--check"]) == 0, "run python scripts/engine_docs.py"


def test_every_feature_that_keys_ask_for_is_in_the_table() -> None:
    rollout = [
        "top_k=3",
        "top_p=0.5",
        "min_p=0.1",
        "repetition_penalty=1.1",
        "stop=[x]",
        "stop_token_ids=[5]",
        "ignore_eos=true",
    ]
    rollout += ["exact=true", "quantization=fp8", "tensor_model_parallel_size=2"]
    overrides = [f"actor_rollout_ref.rollout.{one}" for one in rollout] + [
        "actor_rollout_ref.model.lora_rank=2",
        "trainer.n_gpus_per_node=2",
    ]
    config = load_config(PPOConfig, overrides).config
    asked = {feature for feature, _ in asked_features(config)}
    sampling = {"top_k", "top_p", "min_p", "repetition_penalty", "stop", "stop_token_ids", "ignore_eos"}
    assert asked == sampling | {"exact", "quantization", "tensor_parallel", "lora", "sharded_training"}
    assert asked <= set(FEATURES)
