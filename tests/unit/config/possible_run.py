"""What is wrong with a run, as the user reads it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.errors import ConfigError


def problem(base: list[str], *overrides: str, root: type = PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        prepare_config(root, [*base, *overrides])
    return str(error.value)


def write_model_folder(folder: Path) -> Path:
    """A folder with the files that a run needs of a chat model, as far as they are looked at before it is
    read.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    for name in ("model.safetensors", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_bytes(b"")
    return folder
