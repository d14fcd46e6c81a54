"""Each key says what it is, and the page of keys is fresh."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import load_config
from hybridflow.config.resolve import resolve
from hybridflow.config.show import to_yaml
from hybridflow.config.tree import keys_of

SCRIPT = Path(__file__).parents[3] / "scripts" / "config_docs.py"


def test_yaml_tells_the_meaning_of_each_key() -> None:
    loaded = load_config(PPOConfig, ["data.train_batch_size=64"])
    text = to_yaml(resolve(loaded.config, loaded.given)[0])
    assert "train_batch_size: 64" in text and "# Prompts in one training step" in text
    assert to_yaml(resolve(PPOConfig())[0], only_changed=True) == "{}\n"


def docs_script() -> Any:
    spec = importlib.util.spec_from_file_location("config_docs", SCRIPT)
    assert spec and spec.loader
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_each_key_says_what_it_is_in_sentences(root: type) -> None:
    for path, info in keys_of(root).items():
        assert len(info.meaning) > 15 and info.meaning.endswith("."), f"{path}: {info.meaning}"


def test_the_page_begins_with_the_ten_keys_and_their_command_loads() -> None:
    script = docs_script()
    page = script.render()
    assert len(script.FIRST_KEYS) == 10 and page.index("ten keys") < page.index("How keys are written")
    words = script.first_command().replace("\\\n", "").split()
    assert words[:4] == ["hybridflow", "train", "--recipe", "grpo"]
    loaded = load_config(PPOConfig, words[4:], recipe="grpo")
    assert set(script.FIRST_KEYS) <= loaded.given and not loaded.notes


def test_the_page_of_keys_is_fresh() -> None:
    script = docs_script()
    assert script.TARGET.read_text(encoding="utf-8") == script.render(), "run python scripts/config_docs.py"
