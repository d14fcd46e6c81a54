"""The guard against numbers that are not finite: what is written down, and when it ends the run."""

from __future__ import annotations

import logging
from pathlib import Path

from hybridflow.errors import TrainingError
from hybridflow.protocol import DataProto

logger = logging.getLogger(__name__)


class NonfiniteGuard:
    """Counts optimizer steps in a row whose loss or gradient norm is not finite; after `limit` of them a
    TrainingError ends the run.

    `part` is what a rank adds to the name of the folder for its rows; None: it writes nothing, since another
    rank has the same rows.
    """

    def __init__(self, name: str, limit: int, folder: Path | None, part: str | None = "") -> None:
        self.name, self.limit, self.folder, self.part = name, limit, folder, part
        self.in_a_row = 0

    def report(self, batch: DataProto, loss: float, grad_norm: float, num_steps: int) -> None:
        """A step was skipped: keep its rows, warn, or end the run."""
        self.in_a_row += 1
        where = (
            "not written (no folder given)"
            if self.folder is None
            else "written by another rank, which has the same"
        )
        if self.folder is not None and self.part is not None:
            folder = self.folder / f"{self.name}_after_update_{num_steps}_{self.in_a_row}{self.part}"
            batch.save_to_disk(folder)
            where = str(folder)
        text = (
            f"{self.name}: optimizer step skipped, loss {loss}, gradient norm {grad_norm} "
            f"({self.in_a_row} in a row of at most {self.limit}); its rows: {where}"
        )
        if self.in_a_row >= self.limit:
            raise TrainingError(
                f"{text}. The run stops. Look for a broken reward or a learning rate that is too high; "
                "trainer.max_nonfinite_steps sets how many are allowed."
            )
        logger.warning(text)
