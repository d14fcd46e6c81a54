"""The tasks of reasoning-gym by name (`reasoning_gym:chain_sum`); an optional extra.

create_dataset(name, seed, **options) ──► rows, each with its entry as JSON in extra_info
                                      ──► rewards/functions/reasoning_gym.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridflow.data.json_entry import encode_entry
from hybridflow.data.tasks.base import Split
from hybridflow.errors import ConfigError, DataError, install_extra
from hybridflow.protocol.randomness import derive_seed

_ROUNDS = 20


class ReasoningGymTask:
    """Questions of the reasoning-gym task `name`, with its `options`, of which `system_prompt` is ours.

    The validation questions are made first, and training questions that equal one of them are left out.
    Raises ConfigError where the package is not installed, or knows neither the task nor an option.
    """

    def __init__(
        self, name: str, *, seed: int = 0, options: Mapping[str, Any] | None = None, val_size: int = 0
    ) -> None:
        self.name = name
        self.seed = seed
        self.val_size = val_size
        self.options = dict(options or {})
        self.system_prompt = self.options.pop("system_prompt", None)
        if name not in _library().factory.DATASETS:
            raise ConfigError(
                f"data.task.name: reasoning-gym has no task {name!r}; it has: "
                f"{', '.join(sorted(_library().factory.DATASETS))}"
            )
        reserved = {"seed", "size"} & set(self.options)
        if reserved:
            raise ConfigError(
                f"data.task.options: set {', '.join(sorted(reserved))} as data.task.seed and data.task.size"
            )

    def rows(self, split: Split, size: int) -> list[dict[str, Any]]:
        """Make `size` rows of a split. Raises DataError for too few questions outside validation's."""
        entries = self._entries(split, size, set())
        if split == "train" and self.val_size:
            held_out = {entry["question"] for entry in self._entries("validation", self.val_size, set())}
            if any(entry["question"] in held_out for entry in entries):
                entries = self._entries(split, size, held_out)
        return [self._row(entry, split, index) for index, entry in enumerate(entries)]

    def _entries(self, split: Split, size: int, excluded: set[str]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for round_number in range(_ROUNDS):
            wanted = size - len(found)
            if not wanted:
                break
            dataset = self._dataset(
                derive_seed(self.seed, f"reasoning_gym/{split}", round_number) % 2**31, wanted
            )
            found.extend(
                entry for entry in (dataset[i] for i in range(wanted)) if entry["question"] not in excluded
            )
        if len(found) < size:
            raise DataError(
                f"reasoning_gym:{self.name} gave {len(found)} of {size} training questions apart from the "
                f"{len(excluded)} validation questions: make the task larger by data.task.options, or lower "
                "data.task.val_size"
            )
        return found

    def _dataset(self, seed: int, size: int) -> Any:
        try:
            return _library().create_dataset(self.name, seed=seed, size=size, **self.options)
        except (TypeError, ValueError, AssertionError) as error:  # how its configurations refuse an option
            raise ConfigError(
                f"data.task.options={self.options} do not fit reasoning_gym:{self.name}: {error}"
            ) from error

    def _row(self, entry: dict[str, Any], split: Split, index: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": entry["question"]}]
        if self.system_prompt:
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        answer = entry["answer"]
        if answer is not None:
            answer = str(answer)
        return {
            "data_source": f"reasoning_gym:{self.name}",
            "prompt": messages,
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"index": index, "split": split, "entry": encode_entry(entry)},
        }


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"tasks named reasoning_gym:NAME need the package reasoning-gym: {install_extra('tasks')}"
        ) from error
    return reasoning_gym
