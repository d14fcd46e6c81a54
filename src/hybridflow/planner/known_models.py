"""Shapes of well-known models, so that a plan needs no download: what their config.json says of sizes."""

from __future__ import annotations

import difflib
import json
from functools import cache
from pathlib import Path
from typing import Any

from hybridflow.config.model import ModelConfig
from hybridflow.errors import ModelError
from hybridflow.planner.model_shape import ModelShape, load_shape, read_shape


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the facts by name of the model, without the owner in front of it."""
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "models.json").read_text())
    return found


@cache
def shape_of(path: str) -> ModelShape:
    """Return the shape of a model that is a folder, a config.json, or a known name. Raises ModelError."""
    if Path(path).expanduser().exists():
        return load_shape(path)
    name = path.rstrip("/").rpartition("/")[2]
    known = known_models()
    for ending in ("", "-Instruct", "-Base"):
        if name.endswith(ending) and name.removesuffix(ending) in known:
            base = name.removesuffix(ending)
            return read_shape(known[base], base)
    near = difflib.get_close_matches(name, known, n=3)
    raise ModelError(
        f"{path} is no folder and no config.json, and no model whose sizes are known"
        + (f"; did you mean {', '.join(near)}?" if near else "")
        + ": give the path of its config.json, which is all that a plan reads"
    )


def shape_by_keys(model: ModelConfig) -> ModelShape:
    """Return the shape of the model that these keys name. Raises ModelError, also if it cannot be trained."""
    shape = shape_of(str(model.path))
    recurrent = sum(layer.kv_numbers == 0 for layer in shape.layers)
    if recurrent:
        raise ModelError(
            f"{model.path} has linear attention in {recurrent} of its {len(shape.layers)} layers, and such "
            "models cannot be trained here: plan for one whose layers all attend to tokens"
        )
    return shape
