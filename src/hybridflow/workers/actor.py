"""The actor: the policy in training, and the typed group by which the driver calls it."""

from __future__ import annotations

from dataclasses import replace

from hybridflow.algorithms.aggregation import LossScale, masked_sum
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.needs import wants_full_kl
from hybridflow.config.root import DistillationLossConfig
from hybridflow.controller import Dispatch, register
from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.heads.divergence import DivergenceSpec
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import ROUTES, TOP_OUTCOMES
from hybridflow.weight_sync.push import WeightExport, WeightShare
from hybridflow.workers.correction import complete_correction, sampled_rows
from hybridflow.workers.log_prob_check import LogProbCheck, OffPolicy, measure_off_policy
from hybridflow.workers.losses import find_policy_loss, policy_loss
from hybridflow.workers.mini_batches import MiniBatchPlan, Prepare, add_update, mini_batches
from hybridflow.workers.state import StatefulGroup, StatefulWorker

POLICY_COLUMNS = ("input_ids", "attention_mask", "response_mask")
"""The columns that a forward of a policy or a value model reads."""
UPDATE_COLUMNS = ("uid", *POLICY_COLUMNS, "loss_mask")
"""The columns of every update; the uid is there to name the rows of a step that is skipped."""
MEASURED_COLUMNS = (
    "uid",
    "group_ids",
    "trajectory_id",
    "call",
    "is_demonstration",
    "response_mask",
    "policy_version",
    "rollout_log_probs",
    "old_log_probs",
    "entropys",
)
"""The columns that `ActorWorker.measure` reads where a batch has them. With `group_ids` a trajectory stays
whole.
"""
NOTHING = OffPolicy()


class ActorWorker(StatefulWorker):
    """A worker that holds the policy's engine; where the rollout shares its process, it generates with this
    module.
    """

    def __init__(
        self,
        engine: TrainEngine,
        config: ActorConfig,
        *,
        temperature: float,
        log_prob_limits: BatchLimits,
        delta_push: bool = False,
        distillation: DistillationLossConfig | None = None,
    ) -> None:
        """Build a worker around an engine. `distillation` says the divergence that the loss has."""
        super().__init__(engine)
        self.config = config
        self.temperature = temperature
        self.log_prob_limits = log_prob_limits
        self.distillation = distillation
        self.loss = find_policy_loss(config)  # once: a user's file may be edited while the run goes on
        self.delta_push = delta_push
        self._export: WeightExport | None = None
        if config.router_replay.mode != "disabled" or config.router_aux_loss_coef:
            engine.policy.follow_routes().balance_coef = config.router_aux_loss_coef
        self.limits = BatchLimits(
            config.ppo_max_token_len_per_gpu,
            config.ppo_micro_batch_size_per_gpu,
            keep_groups=self.loss.keeps_groups,
            share_prompts=log_prob_limits.share_prompts,
        )

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=POLICY_COLUMNS,
        writes=("old_log_probs", "entropys", "sum_pi_squared", ROUTES),
    )
    def log_probs(
        self,
        batch: DataProto,
        *,
        with_entropy: bool = True,
        with_sum_pi_squared: bool = False,
        with_routes: bool = False,
    ) -> DataProto:
        """Return old_log_probs, and where asked entropys and sum_pi_squared, under the current weights.

        Each is [B, R] float32; log-probs and entropy are in nats. `with_routes` adds routed_experts
        [B, T, W] int16. Rows that have this column go to these experts.
        """
        spec = OutputSpec(
            log_probs=True,
            entropy=with_entropy,
            sum_pi_squared=with_sum_pi_squared,
            temperature=self.temperature,
            routes=with_routes,
        )
        outputs = self.engine.forward(batch, spec, self.log_prob_limits)
        names = {"log_probs": "old_log_probs", "entropy": "entropys", "routes": ROUTES}
        return DataProto.from_dict({names.get(name, name): values for name, values in outputs.items()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=("loss_mask",))
    def measure(self, batch: DataProto, *, off_policy: OffPolicy = NOTHING) -> Metrics:
        """Return what `off_policy` asks for; and where a pass has given entropys, actor/entropy in nats, the
        mean over the tokens of `loss_mask` that the policy sampled.
        """
        metrics = measure_off_policy(batch, off_policy)
        sampled = batch.batch["loss_mask"] & sampled_rows(batch)[:, None]
        if "entropys" in batch and bool(sampled.any()):
            total = masked_sum(batch.batch["entropys"], sampled)
            metrics.add_mean("actor/entropy", total, float(sampled.sum()))
        return metrics

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=(*UPDATE_COLUMNS, "old_log_probs", "advantages")
    )
    def update_mini_batch(
        self, batch: DataProto, *, scale: LossScale, watch: LogProbCheck | None = None
    ) -> Metrics:
        """Take one optimizer step on the rows of one mini-batch; `scale` counts all of it.

        With `watch` the weights are still those that generated: in exact mode TrainingError is raised where
        the log-probs differ.
        """
        apart: DivergenceSpec | None = None
        if self.distillation is not None:
            known = TOP_OUTCOMES in batch or self.engine.policy.teacher is not None
            assert known, "the teacher has told its outcomes, or computes beside the actor"
            kind = self.distillation.loss_mode.removesuffix("_topk")
            renormalize = self.distillation.tail == "renormalize"
            apart = DivergenceSpec(kind, self.distillation.jsd_beta, renormalize)
        loss = policy_loss(self.config, scale, self.loss, watch, self.distillation)
        spec = OutputSpec(
            log_probs=True,
            entropy=self.config.entropy_coeff != 0.0 or watch is not None,
            full_kl=wants_full_kl(self.config),
            divergence=apart,
            temperature=self.temperature,
        )
        return self.engine.train_mini_batch(batch, spec, loss, self.limits)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def weight_sums(self) -> dict[str, tuple[Box, int]]:
        """Return the part of each of the current weights that this rank holds, with its checksum, by name."""
        return {
            held.name: (held.box, int(bit_sum(held.tensor.to(held.compute_dtype), held.box)))
            for held in self.engine.held_weights()
        }

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def set_exact(self, mode: ExactMode | None) -> None:
        """Compute in this mode from now on; a rollout that shares the module generates in it."""
        self.engine.policy.exact = mode
        if mode is not None:  # rows that share a prompt have other bits
            self.limits = replace(self.limits, share_prompts=False)
            self.log_prob_limits = replace(self.log_prob_limits, share_prompts=False)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def export_buckets(self, version: int) -> WeightShare:
        """Return this rank's part of the weights, called `version`, for replicas in other processes."""
        return self._exported(version, whole=False)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def export_whole(self, version: int) -> WeightShare:
        """Return what `export_buckets` does, as whole tensors: replicas may take other weights before."""
        return self._exported(version, whole=True)

    def _exported(self, version: int, *, whole: bool) -> WeightShare:
        if self._export is None:
            self._export = WeightExport(self.engine.held_weights, self.engine.device, deltas=self.delta_push)
        self.engine.onload()
        try:
            return self._export.share(version, whole=whole)
        finally:
            self.engine.offload()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def export_again(self, version: int) -> WeightShare:
        """Return this rank's part of the weights that were exported last, `version`, as whole tensors."""
        assert self._export is not None, "there was an export before"
        return self._export.again(version)


class ActorGroup(StatefulGroup[ActorWorker]):
    """The driver's view of the actor."""

    version = 0
    """The version of its weights, as the source of batches has published them last."""

    def log_probs(self, batch: DataProto, *, with_entropy: bool = True) -> DataProto:
        """Return log-probs under the current weights as `ActorWorker.log_probs` does."""
        return self.call(ActorWorker.log_probs, batch, with_entropy=with_entropy)

    def keep_log_probs(
        self,
        batch: DataProto,
        *,
        with_sum_pi_squared: bool = False,
        with_routes: bool = False,
    ) -> DataProto:
        """Compute the columns of `ActorWorker.log_probs`, and leave them with the workers."""
        columns = ["old_log_probs", "entropys"]
        if with_sum_pi_squared:
            columns.append("sum_pi_squared")
        if with_routes:
            columns.append(ROUTES)
        return self.call_and_keep(
            ActorWorker.log_probs,
            columns,
            batch,
            with_sum_pi_squared=with_sum_pi_squared,
            with_routes=with_routes,
        )

    def measure(self, batch: DataProto, off_policy: OffPolicy) -> Metrics:
        """See `ActorWorker.measure`; nothing is called where there is nothing to measure."""
        if off_policy.is_empty and not batch.has("entropys"):
            return Metrics()
        return complete_correction(self.call(ActorWorker.measure, batch, off_policy=off_policy))

    def update(
        self,
        batch: DataProto,
        plan: MiniBatchPlan,
        *,
        prepare: Prepare | None = None,
        watch: LogProbCheck | None = None,
    ) -> Metrics:
        """Take an optimizer step for each mini-batch of each epoch.

        `watch` is for the first mini-batch, the only one under the weights that generated.
        """
        rows = self.columns_read(ActorWorker.update_mini_batch, batch)
        if prepare is not None and batch.has("rollout_log_probs"):  # which it may compare with those of now
            rows |= batch.select(["rollout_log_probs"], [])
        if watch is None and rows.has("policy_version"):
            rows.pop(["policy_version"])  # only the check looks at it
        metrics = Metrics()
        for mini, scale in mini_batches(rows, plan, metrics, name="actor", prepare=prepare):
            add_update(metrics, self.call(ActorWorker.update_mini_batch, mini, scale=scale, watch=watch))
            watch = None
        return metrics
