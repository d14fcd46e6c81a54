"""The layout of a model over the ranks of its pool, rank by rank: what each holds, and which rows it has.

actor rank 2: stage 2 of 2, shard 1 of 2 │ rows of part 1 of 2 │ layers 12 to 23, last norm and head
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hybridflow.config.explain import Line
from hybridflow.models.stages import layers_of_parts
from hybridflow.planner.memory import Engine

MOST_RANKS = 16
"""Ranks that are drawn; the others go on in the same way."""


def layout_lines(engine: Engine, role: str) -> Iterator[Line]:
    """Yield a line for each rank of a model that is divided otherwise than into shards alone."""
    layout = engine.layout
    if layout.world_size == layout.dp_shard and layout.cp == layout.ep == 1:
        return
    held = _layers(engine, role)
    for rank in range(min(layout.world_size, MOST_RANKS)):
        how = f"rows of part {layout.data_rank(rank) + 1} of {layout.data}"
        if layout.cp > 1:
            how += f", every {layout.cp} ranks share their tokens"
        if layout.pp > 1:
            how += f"; {held[rank // layout.stage_size]}"
        yield Line(f"{engine.role} rank {rank}", layout.place(rank), how)
    if layout.world_size > MOST_RANKS:
        rest = f"{engine.role} ranks {MOST_RANKS} to {layout.world_size - 1}"
        yield Line(rest, "go on in the same way", "")


def _layers(engine: Engine, role: str) -> list[str]:
    """Return the layers of each stage, in words."""
    layout = engine.layout
    if layout.pp == 1:
        return []
    if not Path(str(engine.model.path)).expanduser().is_dir():
        return ["its layers are cut when the model is there"] * layout.pp
    parts = layout.pp * engine.fsdp.virtual_pipeline_parallel_size
    is_value = role in ("critic", "reward_model")
    ranges = layers_of_parts(engine.model, parts, is_value=is_value)
    words = []
    for stage in range(layout.pp):
        some = [_named(each) for each in ranges[stage :: layout.pp]]
        if stage == 0:
            some.insert(0, "embeddings")
        if stage == layout.pp - 1:
            some.append("last norm and head")
        words.append(", ".join(some))
    return words


def _named(layers: range) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]} to {layers[-1]}"
