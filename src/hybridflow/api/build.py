"""Loads models from folders and saves them to folders, for programs."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER


def load_trained(checkpoint: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a checkpoint, which is merged where it holds no whole model.

    Raises CheckpointError for one that is damaged.
    """
    from hybridflow.data.tokenizer import load_tokenizer
    from hybridflow.merger import merge
    from hybridflow.models.files.build import load_saved

    folder = checkpoint / ACTOR / HF_FOLDER
    with TemporaryDirectory(prefix=".merged_", dir=checkpoint.parent) as merged:
        if not any(folder.glob("*.safetensors")):
            folder = merge(checkpoint, merged)
        return load_saved(folder), load_tokenizer(folder)


def save_loaded(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a loaded model and its tokenizer into a folder."""
    from hybridflow.data.tokenizer import save_tokenizer
    from hybridflow.models.files.progress import without_progress_bars

    with without_progress_bars():
        model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
