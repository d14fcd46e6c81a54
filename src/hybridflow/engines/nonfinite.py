"""The guard against a loss or gradient that is not finite: it keeps the rows, says why, and ends the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from hybridflow.errors import TrainingError
from hybridflow.protocol import DataProto

logger = logging.getLogger(__name__)

_ODD_LOG_PROB = (
    "Either the weights have diverged (then lower the learning rate), or a sampled token has probability 0, "
    "log-prob -inf, which makes importance ratios and KL terms NaN or infinite (then look for tokens that "
    "generation allows and training does not)"
)
_BROKEN_INPUT = "Look at what it was computed from, first of all the scores of the reward function"
_OVERFLOW = (
    "The model's outputs and the columns of its rows are finite, so the loss or its gradient overflows. Look "
    "for a learning rate that is too high, and for a reward or an advantage of great size"
)


class NonfiniteGuard:
    """A count of optimizer steps in a row whose loss or gradient norm is not finite.

    After `limit` of them a TrainingError ends the run. Rows are written below `folder`; `part` is what this
    rank adds to the name of its own, or None where another rank has the same rows and writes them.
    """

    def __init__(self, name: str, limit: int, folder: Path | None, part: str | None = "") -> None:
        self.name = name
        self.limit = limit
        self.folder = folder
        self.part = part
        self.in_a_row = 0

    def report(
        self,
        batch: DataProto,
        loss: float,
        grad_norm: float,
        num_steps: int,
        outputs: Mapping[str, int] | None = None,
    ) -> None:
        """Count a skipped step, write down its rows, and warn; TrainingError after too many in a row.

        `num_steps` optimizer steps were applied before. `outputs`: how many of the module's outputs for these
        rows are not finite, by name.
        """
        self.in_a_row += 1
        text = (
            f"{self.name}: this optimizer step is skipped, because its loss or its gradient is not finite "
            f"(loss {loss}, gradient norm {grad_norm}; {self.in_a_row} in a row of at most {self.limit}). "
            f"{_cause(batch, outputs or {})}. {self._keep(batch, num_steps)}"
        )
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{text}. The run stops; trainer.max_nonfinite_steps sets how many such steps in a row are "
                "allowed."
            )
        logger.warning(text)

    def _keep(self, batch: DataProto, num_steps: int) -> str:
        """Write down the rows of a skipped step, and return a sentence that says where they are."""
        if self.folder is None:
            return "Its rows are not kept, as no folder was given for them"
        if self.part is None:
            return "Its rows are written down by another rank, which has the same"
        folder = self.folder / f"{self.name}_after_update_{num_steps}_{self.in_a_row}{self.part}"
        batch.save_to_disk(folder)
        return f"Its rows are in {folder}"


def _cause(batch: DataProto, outputs: Mapping[str, int]) -> str:
    """Return what is known of why a step is not finite, as sentences that say where to look."""
    for name, where, value in _odd_entries(batch):
        if _is_log_prob(name):
            return f"{name} is {value} at {where}. {_ODD_LOG_PROB}"
        return f"{name} is {value} at {where}. {_BROKEN_INPUT}"
    for name, count in outputs.items():
        if count:
            found = f"{count} of the model's {name} for these rows are not finite"
            if _is_log_prob(name):
                return f"{found}. {_ODD_LOG_PROB}"
            return f"{found}. {_OVERFLOW}"
    return _OVERFLOW


def _is_log_prob(name: str) -> bool:
    return name.endswith(("log_probs", "log_prob"))


def _odd_entries(batch: DataProto) -> Iterator[tuple[str, str, float]]:
    """Yield the first entry that is not finite of each per-token column, where its token is learned from."""
    mask = batch.batch["loss_mask" if "loss_mask" in batch else "response_mask"].bool()
    for name, column in sorted(batch.batch.items()):
        if not isinstance(column, Tensor) or not column.is_floating_point() or column.shape != mask.shape:
            continue
        odd = (~column.isfinite() & mask.to(column.device)).nonzero()
        if len(odd):
            row, token = odd[0].tolist()
            yield name, f"row {row}, response token {token}", float(column[row, token])
