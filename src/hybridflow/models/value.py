"""The critic's network: the backbone of a causal LM and one number per predicted token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hybridflow.models.float64 import compute_in_float64
from hybridflow.models.policy import device_of, packed_hidden, sequence_cut, use_attention
from hybridflow.models.vision import Vision

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import PretrainedConfig, PreTrainedModel

    from hybridflow.distributed.mesh import Column
    from hybridflow.protocol.packing import PackedBatch


HEAD_NAMES = ("score", "classifier", "v_head.summary", "v_head", "value_head", "reward_head", "rm_head")
"""Names that the head of a reward model has in files; transformers' own come first."""


def find_head(hf: Any) -> str | None:
    """Return the name of the head of a classifier of transformers; None of a model without one."""
    return next((name for name in HEAD_NAMES[:2] if isinstance(getattr(hf, name, None), nn.Module)), None)


def is_head(name: str) -> bool:
    """Return whether a tensor of a file belongs to a head by one of the names of `HEAD_NAMES`."""
    return name.rpartition(".")[0] in HEAD_NAMES


class ValueModel(nn.Module):
    """The value of the state before token t, read at the position that predicts token t.

    The head is that of a token classifier with one label, which a merged critic is. On a language model's
    backbone it starts at zero, so the first values are 0.
    """

    new_head: bool = False
    """Whether the files of a classifier had no head, so that its numbers are 0 until it is trained."""

    sequence_group: ProcessGroup | None = None
    """Ranks that share the tokens of a forward pass; each gets the same packed batch and the same values."""
    sequence_ring = False
    """Whether these ranks attend in a ring instead of exchanging heads."""
    column: Column | None = None
    """Ranks that hold the other stages of the model, or None where this rank has all layers."""

    def __init__(self, hf: PreTrainedModel) -> None:
        """Take the backbone of `hf`, and the head of a classifier; a language model's is left behind."""
        super().__init__()
        use_attention(hf)
        self.backbone: Any = hf.base_model
        self.vision = Vision.of(hf.base_model)
        if self.dtype == torch.float64:
            compute_in_float64(hf)
        kind = torch.promote_types(self.dtype, torch.float32)
        self.head_name = find_head(hf)
        """Name of the classifier's head in `hf`, or None."""
        if self.head_name is not None:
            self.head: Any = hf.get_submodule(self.head_name).to(kind)
            self.new_head = getattr(hf, "new_head", False)
        else:
            size = hf.config.get_text_config().hidden_size
            # its own draw would move the global stream
            self.head = nn.utils.skip_init(nn.Linear, size, 1, dtype=kind, device=self.device)
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        self.train(hf.training)

    @property
    def config(self) -> PretrainedConfig:
        """The backbone's Hugging Face configuration."""
        config: PretrainedConfig = self.backbone.config
        return config

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return device_of(self)

    @property
    def dtype(self) -> torch.dtype:
        """The backbone's compute dtype; the head's is float32 or better."""
        dtype: torch.dtype = next(self.backbone.parameters()).dtype
        return dtype

    @property
    def text(self) -> nn.Module:
        """The part of the backbone that reads tokens, all of it in a model of text."""
        text: nn.Module = self.backbone
        if self.vision is not None:
            text = self.vision.text
        return text

    def forward(self, packed: PackedBatch) -> Tensor:
        """Return values [M] of the predicted tokens, in reward units, float32 or better."""
        cut = sequence_cut(packed, self.sequence_group, self.config, self.sequence_ring)
        states = packed_hidden(self.text, packed, self.device, cut, vision=self.vision)
        # FSDP warns of modules that return views
        values: Tensor = self.head(states.to(self.head.weight.dtype))[:, 0].clone()
        if cut is not None:
            (values,) = cut.gather([values])
        return values
