"""Does our attention compute what this model means? Asked once when a model is loaded, on a few tokens.

Rows of different length are packed and their log-probs compared with those of each row alone under transformers' own eager
attention: a layer that never calls the attention function, or an architecture whose rows see each other when packed (recurrent
and linear-attention layers), is found here and not in a run that quietly learns from wrong log-probs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import ModelError
from hybridflow.models.attention import ATTENTION_NAME, PackedLayout
from hybridflow.models.policy import PolicyModel

_LENGTHS = (7, 12, 4)
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}


class _CountingLayout(PackedLayout):
    """A packed layout that counts which layers called it."""

    calls: Counter[int]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        self.calls[settings["layer_idx"]] += 1
        return super().attend(query, key, value, **settings)


@torch.no_grad()
def probe_policy(policy: PolicyModel, tolerance: float | None = None) -> float:
    """The largest difference, in nats, between packed log-probs and each row's alone; ModelError where it is above `tolerance`.

    The default tolerance goes by the dtype: 1e-3 in float32, 0.3 in bfloat16 (wrong attention shifts log-probs by 1 to 2).
    """
    was_training = policy.training
    policy.eval()
    try:
        rows = _rows(policy)
        packed = _packed(policy, rows)
        alone = _alone(policy, rows)
    finally:
        policy.train(was_training)
    limit = tolerance if tolerance is not None else _TOLERANCES.get(policy.dtype, 0.3)
    worst = max(float((ours - theirs).abs().max()) for ours, theirs in zip(packed, alone, strict=True))
    if not worst <= limit:  # also where it is nan
        raise ModelError(
            f"{type(policy.hf).__name__} does not give the same log-probs packed as alone: they differ by {worst:.3g} nats, at most {limit:.3g} is "
            "allowed. Its layers do something our attention does not know, so it cannot be trained here"
        )
    return worst


def _rows(policy: PolicyModel) -> list[Tensor]:
    """Token ids that differ from row to row, spread over the vocabulary; no random numbers."""
    vocabulary = policy.head.weight.shape[0]
    ids = [[(1 + 7919 * (row + 1) * (place + 1)) % vocabulary for place in range(length)] for row, length in enumerate(_LENGTHS)]
    return [torch.tensor(row, device=policy.device) for row in ids]


def _packed(policy: PolicyModel, rows: list[Tensor]) -> list[Tensor]:
    """Log-probs [length, V] of each row, from one packed pass; ModelError if a layer did not call our attention."""
    layout = _CountingLayout.build(_LENGTHS, policy.device)
    assert isinstance(layout, _CountingLayout)
    layout.calls = Counter()
    positions = torch.cat([torch.arange(len(row), device=policy.device) for row in rows])
    hidden = policy.hidden(torch.cat(rows)[None], positions[None], layout)
    wanted = policy.config.get_text_config().num_hidden_layers
    if len(layout.calls) != wanted or set(layout.calls.values()) != {1}:
        raise ModelError(
            f"{type(policy.hf).__name__}: {len(layout.calls)} of {wanted} layers call the attention function (calls by layer: {dict(layout.calls)}). "
            "Recurrent and linear-attention layers mix rows when packed, so this model cannot be trained here"
        )
    return list(policy.logits(hidden)[0].log_softmax(-1).split(_LENGTHS))


def _alone(policy: PolicyModel, rows: list[Tensor]) -> list[Tensor]:
    """Log-probs [length, V] of each row run by itself with transformers' eager attention."""
    policy.hf.set_attn_implementation("eager")
    try:
        logits = [policy.hf(input_ids=row[None], use_cache=False).logits[0] for row in rows]
    finally:
        policy.hf.set_attn_implementation(ATTENTION_NAME)
    return [x.to(torch.promote_types(x.dtype, torch.float32)).log_softmax(-1) for x in logits]
