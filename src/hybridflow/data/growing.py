"""Training data that grow while the run goes on: after each step a user's class makes rows of what happened.

finished batch ──generate(dataset)──► rows ──as JSON──► GrowingPrompts ──► the epochs that begin after it

What was made is in checkpoints, as text, so a resumed run has the same rows in the same order. Neither an
error of the class nor a row that cannot be used ends the run.
"""

from __future__ import annotations

import json
import logging
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hybridflow.config.data import DataConfig, DatagenConfig
from hybridflow.config.own_code import generate_faults
from hybridflow.config.source_code import Definition, definition_of
from hybridflow.data.files import Row, Rows
from hybridflow.data.loader import StatefulSampler
from hybridflow.data.plugin import blaming, join_spec, load_function
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

KEY = "data.datagen"


class AbstractDataGenerator(ABC):
    """A base of classes that make rows; any other class with its methods will do.

    One with `state_dict` and `load_state_dict`, which give and take plain data, goes on after a resume.
    """

    def __init__(self, config: DatagenConfig) -> None:
        self.config = config
        self.options = config.options

    @abstractmethod
    def generate(self, dataset: GrowingPrompts) -> Iterable[Mapping[str, Any]]:
        """Return the rows to add after a step, with the columns of the training data.

        `dataset.rows` has all rows so far. With a further argument `batch` it gets the rows of the step, a
        DataProto with prompts, responses and scores.
        """


class GrowingPrompts(PromptDataset):
    """The prompts of the training data, and behind them those that `data.datagen` has made."""

    def __init__(self, rows: Rows | Sequence[Row], tokenizer: Tokenizer, config: DataConfig) -> None:
        """Read the rows at the start, and make the generator. Raises what `PromptDataset` does, and
        ConfigError for a class that cannot be used.
        """
        super().__init__(rows, tokenizer, config)
        self.num_given = len(self)
        spec = join_spec(config.datagen.path, config.datagen.name, key=KEY)
        assert spec is not None, "a dataset grows where there is a path"
        self.generator = load_function(spec, key=KEY)(config.datagen)
        generate = getattr(self.generator, "generate", None)
        found = definition_of(generate) if callable(generate) else Definition("missing")
        for fault in generate_faults(f"{KEY}: {spec}", found, ["dataset"]):
            raise ConfigError(fault)
        self._name = f"{KEY}: {type(self.generator).__name__}.generate"
        self._takes_batch = found.signature is not None and "batch" in found.signature.parameters
        self._store: Callable[[Any], object] | None = None
        self._made = ""
        self._failures = 0

    def on_batch_end(self, batch: Any) -> None:
        """Add what the generator makes after the step of `batch` (a DataProto).

        What it raises, and rows that cannot be used, are logged and counted.
        """
        try:
            also = {"batch": batch} if self._takes_batch else {}
            made = [dict(row) for row in self.generator.generate(self, **also) or ()]
            text = json.dumps(made, default=_plain)
            if made:
                self._add(text)
        except Exception as error:  # a user's code: anything may come out of it
            self._failures += 1
            told = "".join(traceback.format_exception(error)).strip()
            logger.warning("%s has added no rows after this step: it raised\n%s", self._name, told)

    def stored_by(self, store: Callable[[Any], object]) -> None:
        """Have every state of the generator go through `store`, that of now at once: ConfigError, which names
        the class, where it raises CheckpointError.
        """
        self._store = store
        self.state_dict()

    def growth(self) -> dict[str, float]:
        """Return how many prompts there are, how many of them were made, and how often making them failed."""
        return {
            "data/num_prompts": float(len(self)),
            "data/num_made_prompts": float(len(self) - self.num_given),
            "data/num_datagen_failures": float(self._failures),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what was made, a line of JSON for each step with rows, and the generator's own state."""
        state: dict[str, Any] = {"made": self._made, "failures": self._failures}
        if isinstance(self.generator, StatefulSampler):
            whose = f"{KEY}: {type(self.generator).__name__}.state_dict"
            with blaming(whose):
                state["generator"] = self.generator.state_dict()
            try:
                if self._store is not None:
                    self._store(state["generator"])
            except CheckpointError as error:
                raise ConfigError(f"{whose}: {error}") from error
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take in what was made until `state`. Raises CheckpointError for rows that can no longer be read."""
        for line in state["made"].splitlines():
            try:
                self._add(line)
            except Exception as error:  # of the tokenizer's template
                raise CheckpointError(
                    f"{KEY}: rows that the checkpoint's run had made cannot be used in this one: {error}"
                ) from error
        self._failures = int(state["failures"])
        if isinstance(self.generator, StatefulSampler) and "generator" in state:
            with blaming(f"{KEY}: {type(self.generator).__name__}.load_state_dict"):
                self.generator.load_state_dict(state["generator"])

    def _add(self, text: str) -> None:
        """Add the rows of a line of JSON: in a resumed run they are read as they were read first."""
        self.extend(json.loads(text), self._name)
        self._made += f"{text}\n"


def _plain(value: Any) -> Any:
    """Return an array or a number of numpy or torch as plain data. Raises TypeError for other objects."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a row holds a {type(value).__name__}: wanted texts, numbers, lists and dicts alone")
