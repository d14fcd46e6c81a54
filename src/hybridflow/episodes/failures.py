"""Failed trajectories of a run: counts by cause, and the text of the first one of each cause.

Trajectories ──add_all, end_step──► Failures ──► failures.json, which the report shows
                                   └──end_run──► RolloutError where no step had a trajectory
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hybridflow.errors import RolloutError
from hybridflow.protocol.trajectory import Outcome

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS = 3
"""Steps in a row whose trajectories have all failed before the run ends."""


class Failures:
    """Failed trajectories of this process's part of a run; `file` has the first texts of the whole run."""

    def __init__(self, file: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}
        """Text of the first failure of each cause."""
        self._file = file
        self._in_a_row = 0
        self._has_learned = False

    def begin(self, step: int) -> None:
        """Start after a step that the run has trained; at 0 remove the file of an earlier run in the
        same folder.
        """
        self._has_learned = step > 0
        if not self._has_learned:
            self._file.unlink(missing_ok=True)

    def add_all(self, failed: Sequence[Outcome]) -> None:
        """Count trajectories that have failed, by their outcomes."""
        known = len(self.first)
        for outcome in failed:
            cause = str(outcome.cause)
            self.counts[cause] += 1
            self.first.setdefault(cause, outcome.detail)
        if len(self.first) == known:
            return
        earlier = {}
        with suppress(OSError, ValueError):  # there is none yet, or its run was killed as it wrote
            earlier = json.loads(self._file.read_text(encoding="utf-8"))
        self._file.write_text(json.dumps({**self.first, **earlier}), encoding="utf-8")

    def end_step(self, num_rows: int) -> None:
        """Note how many rows a step has; RolloutError after too many steps in a row without rows."""
        if num_rows:
            self._in_a_row = 0
            self._has_learned = True
            return
        self._in_a_row += 1
        logger.warning("every trajectory of a step has failed, so nothing is learned")
        if self._in_a_row == MAX_FAILED_STEPS:
            raise RolloutError(f"every trajectory of the last {MAX_FAILED_STEPS} steps has failed: {self}")

    def end_run(self) -> None:
        """Raise RolloutError where there were steps, and every trajectory of all of them has failed."""
        if self._in_a_row and not self._has_learned:
            raise RolloutError(f"every trajectory of all steps has failed, so nothing was learned: {self}")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} by {cause}" for cause, count in self.counts.most_common())
        texts = [f"\nthe first by {cause}: {text}" for cause, text in self.first.items()]
        return "".join([counts, *texts])
