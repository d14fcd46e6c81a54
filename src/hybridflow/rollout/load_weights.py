"""The copy of received weights into an engine's module, which is the same for all engines in this process."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hybridflow.errors import RolloutError
from hybridflow.rollout.base import SomeWeights

MAX_NAMES = 5
"""Missing weights that a message names."""


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy weights into a Hugging Face model, by name.

    Raises RolloutError for a name or shape that the model does not have, and for weights that are missing,
    unless the sender says by `SomeWeights` that the others are in place.
    """
    own = model.state_dict(keep_vars=True)
    lacking = {id(parameter): name for name, parameter in reversed(list(own.items()))}
    for name, weight in weights:
        if name not in own or own[name].shape != weight.shape:
            has = "it has no weight of that name"
            if name in own:
                has = f"its own is {tuple(own[name].shape)}"
            raise RolloutError(
                f"update_weights got {name!r} of shape {tuple(weight.shape)}, which does not fit the "
                f"model: {has}"
            )
        own[name].copy_(weight)
        lacking.pop(id(own[name]), None)  # with one of two tied weights the other has come too
    if not lacking or isinstance(weights, SomeWeights):
        return
    names = list(lacking.values())[::-1]
    shown = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        shown += f" and {len(names) - MAX_NAMES} more"
    raise RolloutError(
        f"update_weights got {len(own) - len(names)} of {len(own)} weights; missing: {shown}. The "
        "engine now holds old and new weights together: give it all of them, or wrap those that "
        "changed in SomeWeights"
    )
