"""What is wrong with a run, as the user reads it, and tables of such runs."""

from __future__ import annotations

from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.errors import ConfigError


def problem(base: list[str], *overrides: str, root: type = PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        prepare_config(root, [*base, *overrides])
    return str(error.value)


def write_model_folder(folder: Path) -> Path:
    """A folder with the files of a chat model, as far as they are looked at before it is read."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes(b"")
    return folder


def written_out(text: str, names: dict[str, str]) -> str:
    """Return the text with the short names of keys, such as $actor, written out."""
    return Template(text).safe_substitute(names)


def table(file: str) -> Any:
    """Return the sections of a table beside this file."""
    return yaml.safe_load(Path(__file__).with_name(file).read_text(encoding="utf-8"))


def rows(section: list[Any], names: dict[str, str]) -> list[Any]:
    """Return test cases, one for each row: its overrides, and a list of the other texts of the row."""
    found = []
    for row in section:
        overrides, *texts = [row] if isinstance(row, str) else row
        words = [word for word in overrides.split(" ") if word] if isinstance(overrides, str) else overrides
        words = [written_out(word, names) for word in words]
        found.append(pytest.param(words, [written_out(text, names) for text in texts], id=" ".join(words)))
    return found
