"""The call of a module that answers what is asked about packed rows.

Ask ──answer──► PolicyModel, ValueModel or ScoreModel on packed rows ──► {name: [M]}, M predicted tokens
"""

from __future__ import annotations

from torch import nn

from hybridflow.models.ask import Answers, Ask
from hybridflow.models.policy import PolicyModel
from hybridflow.models.score import ScoreModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch


def answer(module: nn.Module, packed: PackedBatch, ask: Ask) -> Answers:
    """Return the answers of `module` for packed rows, each [M] float32 or better."""
    if isinstance(module, ScoreModel):
        assert ask == Ask(scores=True), f"a reward model has scores alone, and is asked {ask}"
        return {"scores": module(packed)}
    if isinstance(module, ValueModel):
        assert ask == Ask(values=True), f"a value model has values alone, and is asked {ask}"
        return {"values": module(packed)}
    assert isinstance(module, PolicyModel)
    assert ask.log_probs and not ask.values and not ask.scores, (
        f"a policy has log-probs and neither values nor scores, and is asked {ask}"
    )
    outputs = module(
        packed,
        temperature=ask.temperature,
        with_entropy=ask.entropy,
        with_sum_pi_squared=ask.sum_pi_squared,
        with_full_kl=ask.full_kl,
    )
    answers = {name: value for name, value in outputs._asdict().items() if value is not None}
    if ask.routes:
        answers["routes"] = module.routes_of(packed)
    return answers
