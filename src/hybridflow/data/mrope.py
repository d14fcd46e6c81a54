"""Positions of the tokens of a picture or a video in models with three positions for each token (M-RoPE).

Source: Qwen2-VL, arXiv 2409.12191, section 2.1; Qwen2.5-VL, arXiv 2502.13923, for the time between frames.
The probe of a model compares what follows from them with transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grid_positions(
    frames: int, height: int, width: int, *, merge: int, interval: float = 1.0
) -> tuple[Tensor, int]:
    """Return positions [3, n] int64 (time, row, column) of the n tokens of a grid of patches, and by how much
    the next token is further on.

    merge × merge patches of a frame are one token. A frame is `interval` positions after the one before; the
    next token follows the longer side of a frame.
    """
    rows = height // merge
    columns = width // merge
    time = (torch.arange(frames) * interval).long()
    grid = torch.meshgrid(time, torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack(grid).reshape(3, -1), max(rows, columns)
