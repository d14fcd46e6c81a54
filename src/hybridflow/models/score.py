"""Reward models: the backbone and the head of a Hugging Face sequence or token classifier.

    hf (…ForSequenceClassification, …ForTokenClassification) ──► backbone ──states──► head ──► scores

A head with one label gives the score. Of one with two labels, the score is the log-odds of the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.errors import ModelError
from hybridflow.models.policy import packed_hidden, sequence_cut
from hybridflow.models.value import HEAD_NAMES, ValueModel, find_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hybridflow.protocol.packing import PackedBatch


class ScoreModel(ValueModel):
    """A score of each row (`of_rows`), read at its last token, or of each token, read at the token itself."""

    hf: PreTrainedModel
    """The classifier that backbone and head belong to; it is no submodule."""
    source_dtype: torch.dtype | None
    """The dtype that the model's folder says its weights have."""

    def __init__(self, hf: PreTrainedModel, *, of_rows: bool) -> None:
        """Take a classifier's backbone and head, which computes in float32 or better.

        Raises ModelError for an architecture without such a head, and for a head of more than two labels.
        """
        name = head_name(hf)
        super().__init__(hf)
        self.of_rows = of_rows
        self.source_dtype = getattr(hf, "source_dtype", None)
        self.__dict__["hf"] = hf
        head = hf.get_submodule(name)
        if not isinstance(head, nn.Linear) or head.out_features > 2:
            raise ModelError(
                f"{type(hf).__name__} has the head {head}: a reward model has a linear layer with one label "
                "(num_labels=1 in config.json), or with two, bad and good"
            )

    def file_name(self, name: str) -> str:
        """Return the name that a parameter of this module has in files."""
        if name.startswith("head."):
            return name.replace("head", str(self.head_name), 1)
        return name.replace("backbone", str(self.hf.base_model_prefix), 1)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return scores [M] of the predicted tokens, float32 or better.

        The score of a row stands at the last of its predicted tokens, with zeros at the others.
        """
        lengths = torch.tensor(packed.lengths, device=packed.rows.device)
        ends = lengths.cumsum(0)
        if not self.of_rows:
            prompts = torch.tensor(packed.prompt_lengths, device=packed.rows.device)
            return self._read(packed, (ends - lengths + prompts)[packed.rows] + packed.columns)
        scores = self._read(packed, ends - 1)
        counts = torch.bincount(packed.rows, minlength=len(lengths))
        assert bool((counts > 0).all()), "a row without a predicted token has no place for its score"
        return scores.new_zeros(len(packed.rows)).index_put((counts.cumsum(0) - 1,), scores)

    def _read(self, packed: PackedBatch, tokens: Tensor) -> Tensor:
        """Return the numbers of the head at `tokens` [K], places among the tokens of all rows in order."""
        on_cpu = tokens.cpu()
        if packed.places is not None:
            on_cpu = packed.places[on_cpu]
        index = on_cpu.to(packed.predict_index.device)
        read = replace(packed, predict_index=index, predict_index_on_cpu=on_cpu, targets=index)
        cut = sequence_cut(read, self.sequence_group, self.config, self.sequence_ring)
        states = packed_hidden(self.text, read, self.device, cut, vision=self.vision)
        numbers: Tensor = self.head(states.to(self.head.weight.dtype))
        scores = numbers[:, -1].clone()  # FSDP warns of modules that return views
        if numbers.shape[1] == 2:
            scores = scores - numbers[:, 0]
        if cut is not None:
            (scores,) = cut.gather([scores])
        return scores


def head_name(hf: Any) -> str:
    """Return the name of a classifier's head; ModelError where it has none of transformers' names."""
    name = find_head(hf)
    if name is not None:
        return name
    raise ModelError(
        f"{type(hf).__name__} has no head called {' or '.join(HEAD_NAMES[:2])}: it is no classifier that can "
        "be a reward model"
    )
