"""The protocol of procedural tasks."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from hybridflow.protocol.randomness import derive_seed

Split = Literal["train", "validation"]


class Task(Protocol):
    """Questions made by a program.

    A row has the schema of `data.prompts` (data_source, prompt, ability, reward_model, extra_info with index
    and split) and, where the task knows a worked answer, `messages` with the assistant's turn, for supervised
    fine-tuning. The rows depend on (the task's seed, split, index) alone, and no training question is a
    validation question.
    """

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]: ...


class EnvironmentTask:
    """Rows of the environment that `spec` names; `Environment.seed` of a row is `extra_info["seed"]`.

    The prompt is empty: the environment's `reset` gives the first message. The seeds depend on (`seed`,
    split, index) alone.
    """

    def __init__(self, spec: str, *, seed: int = 0) -> None:
        self.spec = spec
        self.seed = seed

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of a split; the first rows are the same for every size."""
        return [
            {
                "data_source": self.spec.rpartition(":")[2],
                "prompt": [{"role": "user", "content": ""}],
                "reward_model": {"style": "environment", "ground_truth": None},
                "extra_info": {
                    "index": index,
                    "split": split,
                    "seed": derive_seed(self.seed, f"environment/{split}", index),
                },
            }
            for index in range(size)
        ]
