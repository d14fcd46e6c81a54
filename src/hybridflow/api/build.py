"""Models in and out of folders, with the libraries that this needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER


def load_trained(checkpoint: Path, target: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a checkpoint; `target` keeps the folder that they are read from.

    Where the checkpoint has no whole model, it is merged into that folder. Raises CheckpointError.
    """
    from hybridflow.data.tokenizer import load_tokenizer
    from hybridflow.merger import merge
    from hybridflow.models.build import load_saved

    folder = checkpoint / ACTOR / HF_FOLDER
    if not any(folder.glob("*.safetensors")):
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            merge(checkpoint, target)
        folder = target
    return load_saved(folder), load_tokenizer(folder)


def save_loaded(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a loaded model and its tokenizer into a folder."""
    from hybridflow.models.progress import without_progress_bars

    with without_progress_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
