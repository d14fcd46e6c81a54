"""An engine of another shape behind the same face: a policy cut into two stages, as a pipeline cuts it.

All micro-batches of a mini-batch pass the first stage, then all pass the second one, which has the loss, and
their gradients go back through the first. Losses, gradients and weights are those of the engine that runs the
policy in one piece; the worker above cannot tell the two apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_zoo import same_weights, tiny_policy, training_rows, weights
from torch import Tensor

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.model import OptimConfig
from hybridflow.engines import BatchLimits, LossFn, OutputSpec
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.engines.micro_batch_engine import Accumulated, MicroBatchEngine
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.engines.optimizer import MasterAdamW
from hybridflow.models.attention.layouts import PackedLayout
from hybridflow.models.heads.log_probs import token_log_probs
from hybridflow.models.output_spec import Outputs
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.packing import PackedBatch
from hybridflow.workers.actor import ActorWorker


class TwoStages(MicroBatchEngine):
    """A policy cut after its first layer."""

    def __init__(self, policy: PolicyModel, *, optim: OptimConfig, **settings: Any) -> None:
        optimizer = MasterAdamW(policy.named_parameters(), optim)
        super().__init__(optim=optim, optimizer=optimizer, device=policy.device, **settings)
        self.policy = policy
        self.order: list[str] = []
        """The stage of each pass through a part of the model."""

    def _first(self, packed: PackedBatch) -> Tensor:
        """Return hidden states [1, N, H] behind the first layer."""
        self.order.append("first")
        model: Any = self.policy.hf.base_model
        return self._layers(model.layers[:1], model.embed_tokens(packed.input_ids[None]), packed)

    def _second(self, states: Tensor, packed: PackedBatch, spec: OutputSpec) -> Outputs:
        """Return the answers [M] from hidden states behind the first layer."""
        self.order.append("second")
        model: Any = self.policy.hf.base_model
        states = model.norm(self._layers(model.layers[1:], states, packed))[0]
        outputs = token_log_probs(
            states[packed.predict_index],
            self.policy.head.weight,
            None,
            packed.targets,
            temperature=spec.temperature,
            with_entropy=spec.entropy,
        )
        return {name: value for name, value in outputs._asdict().items() if value is not None}

    def _layers(self, layers: Any, states: Tensor, packed: PackedBatch) -> Tensor:
        model: Any = self.policy.hf.base_model
        positions = packed.position_ids[None]
        layout = PackedLayout.build(packed.lengths, self.device)
        rotary = model.rotary_emb(states, position_ids=positions)
        for layer in layers:
            states = layer(
                states,
                attention_mask=None,
                position_embeddings=rotary,
                position_ids=positions,
                use_cache=False,
                layout=layout,
            )
        return states

    def _forward_all(
        self, micros: Sequence[MicroBatch], spec: OutputSpec
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        passed = [self._first(micro.packed) for micro in micros]
        for micro, states in zip(micros, passed, strict=True):
            yield micro, self._second(states, micro.packed, spec)

    def _accumulate(
        self, micros: Sequence[MicroBatch], spec: OutputSpec, loss: LossFn, sums: Accumulated
    ) -> None:
        passed = [self._first(micro.packed) for micro in micros]
        arrived = [states.detach().requires_grad_() for states in passed]
        for micro, states in zip(micros, arrived, strict=True):
            sums.share(micro, self._second(states, micro.packed, spec), loss).backward()
        for sent, received in zip(passed, arrived, strict=True):
            sent.backward(received.grad)


SETTINGS: dict[str, Any] = {"name": "actor", "optim": OptimConfig(lr=1e-2), "grad_clip": 1.0}
CUT = BatchLimits(20)
"""Four micro-batches of the rows."""
ENTROPY = ActorConfig(entropy_coeff=0.1, ppo_max_token_len_per_gpu=20)

Maker = Callable[[PolicyModel], MicroBatchEngine]
MAKERS: tuple[Maker, Maker] = (
    lambda policy: FSDPEngine(policy, **SETTINGS),
    lambda policy: TwoStages(policy, **SETTINGS),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_stages_train_to_the_bits_of_one(dtype: torch.dtype) -> None:
    rows = training_rows(dtype=torch.float32)
    trained, told = [], []
    for make in MAKERS:
        policy = tiny_policy(dtype, tied=False)
        worker = ActorWorker(make(policy), ENTROPY, temperature=0.8, log_prob_limits=CUT)
        scale = LossScale.count(rows.batch["loss_mask"])
        told.append([worker.update_mini_batch(rows, scale=scale).to_floats() for _ in range(3)])
        trained.append(weights(policy))
    assert told[0] == told[1] and told[0][0]["actor/num_updates"] == 1.0
    assert same_weights(*trained) and not same_weights(trained[0], weights(tiny_policy(dtype, tied=False)))


def test_two_stages_answer_with_the_bits_of_one() -> None:
    rows = training_rows(dtype=torch.float32)
    one, two = (
        ActorWorker(make(tiny_policy()), ENTROPY, temperature=0.8, log_prob_limits=CUT).log_probs(rows)
        for make in MAKERS
    )
    assert set(one.batch.keys()) == {"old_log_probs", "entropys"}
    assert all(torch.equal(one.batch[name], two.batch[name]) for name in ("old_log_probs", "entropys"))


def test_the_first_stage_has_all_micro_batches_before_the_second_begins() -> None:
    engine = TwoStages(tiny_policy(), **SETTINGS)
    worker = ActorWorker(engine, ENTROPY, temperature=0.8, log_prob_limits=CUT)
    rows = training_rows(dtype=torch.float32)
    worker.update_mini_batch(rows, scale=LossScale.count(rows.batch["loss_mask"]))
    assert engine.order == ["first"] * 4 + ["second"] * 4
