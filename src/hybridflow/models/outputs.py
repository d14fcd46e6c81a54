"""The call of the module that computes the outputs wanted of packed rows.

OutputSpec ──outputs_of──► PolicyModel, ValueModel or ScoreModel ──► {name: [M]}, M predicted tokens
"""

from __future__ import annotations

from torch import nn

from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.models.policy import PolicyModel
from hybridflow.models.score import ScoreModel
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch


def outputs_of(module: nn.Module, packed: PackedBatch, spec: OutputSpec) -> Outputs:
    """Return the outputs of `module` for packed rows, each [M, …] float32 or better."""
    if isinstance(module, ScoreModel):
        assert spec == OutputSpec(scores=True), f"a reward model has scores alone, and is asked {spec}"
        return {"scores": module(packed)}
    if isinstance(module, ValueModel):
        assert spec == OutputSpec(values=True), f"a value model has values alone, and is asked {spec}"
        return {"values": module(packed)}
    assert isinstance(module, PolicyModel)
    assert spec.log_probs and not spec.values and not spec.scores, (
        f"a policy has log-probs and neither values nor scores, and is asked {spec}"
    )
    found = module(
        packed,
        temperature=spec.temperature,
        with_entropy=spec.entropy,
        with_sum_pi_squared=spec.sum_pi_squared,
        with_full_kl=spec.full_kl,
        divergence=spec.divergence,
        top=(spec.top_outcomes, spec.top_below),
    )
    outputs = {name: value for name, value in found._asdict().items() if value is not None}
    if spec.routes:
        outputs["routes"] = module.routes_of(packed)
    return outputs
