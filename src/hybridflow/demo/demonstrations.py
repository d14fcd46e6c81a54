"""Conversations from which a tiny model learns the form of an environment's answers, though not all of it.

an environment's name ──demonstrate(rng, well_formed)──► rows with `messages`, for supervised fine-tuning
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from hybridflow.data.tasks import Split
from hybridflow.environments.load import open_environment


class Demonstrations:
    """Task (`data.task.name`) whose rows an environment plays itself; a share `well_formed` is right in form.

    The environment has a method `demonstrate(rng, well_formed)` that returns messages, as guess, calculator
    and search do.
    """

    def __init__(
        self,
        *,
        seed: int,
        environment: str,
        options: Mapping[str, Any] | None = None,
        well_formed: float = 0.2,
    ) -> None:
        self.seed = seed
        self.environment: Any = open_environment(environment, options)
        self.well_formed = well_formed

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of a split; the first rows are the same for every size."""
        rng = random.Random(f"{self.seed} {split}")
        return [{"messages": self.environment.demonstrate(rng, self.well_formed)} for _ in range(size)]
