"""The reference policy, which a KL term or a preference loss compares the actor with, and the teacher of
on-policy distillation.

The reference's weights change only when the actor is copied to it (`algorithm.ref_update_freq`). The teacher
has the actor's vocabulary and its own weights, which never change.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

from hybridflow.controller import Dispatch, register
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.errors import ModelError
from hybridflow.models.heads.divergence import HeadInputs
from hybridflow.models.output_spec import Outputs
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import TOP_OUTCOMES, PackedBatch
from hybridflow.workers.actor import POLICY_COLUMNS
from hybridflow.workers.state import StatefulGroup, StatefulWorker

TEACHER_COLUMN = "teacher_log_probs"


def check_token_ids(batch: DataProto, engine: TrainEngine) -> None:
    """Raise ModelError for a token that the engine's model has no row for.

    Heads of models of one family are padded to different sizes.
    """
    if len(batch) == 0:  # a rank may get no rows
        return
    rows = engine.vocabulary
    highest = int(batch.batch["input_ids"].max())
    if highest >= rows:
        raise ModelError(
            f"the actor sampled the token id {highest}, which is padding of its own head, and this model "
            f"has {rows} rows: take one with as "
            "large a head, or train the actor until it no longer samples padding"
        )


class ReferenceWorker(StatefulWorker):
    """A policy without an optimizer; `column` names its log-probs, since a teacher differs in its weights
    only.

    With `without_adapters` the engine is that of an actor in training by LoRA; the base of that model, which
    never changes, is the reference. `top` is how many most likely tokens are told of each distribution, and
    below which token id. `others` are the engines of
    rows of other data sources than those of `engine`.
    """

    def __init__(
        self,
        engine: TrainEngine,
        *,
        temperature: float,
        limits: BatchLimits,
        column: str = "ref_log_prob",
        without_adapters: bool = False,
        top: tuple[int, int] = (0, 0),
        others: Mapping[str, TrainEngine] | None = None,
    ) -> None:
        super().__init__(engine)
        self.spec = OutputSpec(log_probs=True, top_outcomes=top[0], top_below=top[1], temperature=temperature)
        self.limits = limits
        self.column = column
        self.without_adapters = without_adapters
        self.others = others or {}

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=POLICY_COLUMNS,
        writes=("ref_log_prob", "teacher_log_probs", TOP_OUTCOMES),
    )
    def log_probs(self, batch: DataProto) -> DataProto:
        """One column [B, R] float32 nats: log-probs of the responses at the rollout's temperature.

        Where `top` asks for them, the most likely tokens are one more, [B, R, 2k + 1].
        """
        if not self.others:
            check_token_ids(batch, self.engine)
            with self.engine.without_adapters() if self.without_adapters else nullcontext():
                outputs = self.engine.forward(batch, self.spec, self.limits)
            return self._columns(outputs)
        sources = batch.non_tensor_batch["data_source"]
        of_rows = [source if source in self.others else None for source in sources]
        parts: list[DataProto] = []
        order: list[int] = []
        for name, engine in ((None, self.engine), *self.others.items()):  # in one order on all ranks
            places = [place for place, each in enumerate(of_rows) if each == name]
            rows = batch.select_idxs(places)
            check_token_ids(rows, engine)
            parts.append(self._columns(engine.forward(rows, self.spec, self.limits)))
            order += places
        return DataProto.concat(parts).select_idxs(sorted(range(len(order)), key=order.__getitem__))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_prompts_apart(self) -> None:
        """Compute the prompt of each row from now on, as the actor does in exact mode."""
        self.limits = replace(self.limits, share_prompts=False)

    def _columns(self, outputs: Outputs) -> DataProto:
        columns = {self.column: outputs["log_probs"]}
        if "top_outcomes" in outputs:
            columns[TOP_OUTCOMES] = outputs["top_outcomes"].float()
        return DataProto.from_dict(columns)


class ReferenceHead:
    """The reference's states and head for packed rows, which an update of the actor in this process asks for.

    With `adapted` the engine is the actor's own, whose base is the reference; it is called inside a forward
    pass of the actor then, where its parameters are gathered.
    """

    def __init__(self, engine: TrainEngine, *, adapted: bool = False) -> None:
        self.engine = engine
        self.adapted = adapted

    def __call__(self, packed: PackedBatch) -> HeadInputs:
        """Return what the reference's distributions of `packed.targets` follow from, without gradients."""
        policy = self.engine.policy
        if self.adapted:
            with self.engine.without_adapters():
                return PolicyModel.head_inputs(policy, packed)
        self.engine.onload()
        try:
            return policy.head_inputs(packed)
        finally:
            self.engine.offload()


class ReferenceGroup(StatefulGroup[ReferenceWorker]):
    """The driver's view of the reference."""

    column = "ref_log_prob"

    def log_probs(self, batch: DataProto) -> DataProto:
        """See `ReferenceWorker.log_probs`."""
        return self.call(ReferenceWorker.log_probs, batch)

    def keep_log_probs(self, batch: DataProto, *also: str) -> DataProto:
        """Compute `column`, and those of `also`, as `log_probs` does, and leave them with the workers."""
        return self.call_and_keep(ReferenceWorker.log_probs, [self.column, *also], batch)


class TeacherGroup(ReferenceGroup):
    """The driver's view of the teacher."""

    column = TEACHER_COLUMN
