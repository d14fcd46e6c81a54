"""What a checkpoint keeps of a ledger, so that it can be resumed in a run folder that has none."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from hybridflow.errors import CheckpointError
from hybridflow.trainer.schedules.ledger import Ledger


def packed(ledger: Ledger, position: int) -> Tensor:
    """Return the first `position` lines, compressed, as a tensor [number of bytes] uint8."""
    return torch.frombuffer(bytearray(zlib.compress(ledger.lines(position))), dtype=torch.uint8)


def unpacked(kept: Tensor) -> bytes:
    """Return the lines of which `packed` was made."""
    return zlib.decompress(kept.numpy().tobytes())


def refuse_other_steps(theirs: int, ours: int) -> None:
    """Raise CheckpointError where the checkpoint's run trained another number of groups a step."""
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint's run trained {theirs} groups a step, and this one trains {ours}: groups that "
            f"are ahead of training belong to steps of that size. Set data.train_batch_size={theirs}"
        )
