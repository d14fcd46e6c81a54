"""`global_profiler.*`: what is recorded of some steps, by all processes at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import key

SECOND = (2,)
"""The steps that are recorded where none are named: the first one has what is done once."""
ProfilerTool = Literal["phases", "torch", "torch_memory", "nsys"]
DEVICE_TOOLS = ("torch_memory", "nsys")
"""Tools that record a device, where its kind has them."""


@dataclass(frozen=True)
class ProfilerConfig:
    """Profiles of single steps."""

    tool: ProfilerTool | None = key(
        None,
        "phases records the parts of a step and each call of each rank, in one trace; torch adds torch's "
        "profiler on the ranks, torch_memory a history of device memory; nsys opens the range that Nsight "
        "Systems captures. null: nothing.",
    )
    steps: list[int] | None = key(
        None, "Steps that are recorded, from 1; null: the second one, after whatever is done once.", minimum=1
    )
    ranks: list[int] | None = key(
        None, "Ranks of each role on which tools other than phases record; null: rank 0."
    )
    save_path: str | None = key(None, "Folder of the traces; null: profile/ in the run folder.")
