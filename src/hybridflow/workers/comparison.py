"""The worker that learns from comparisons of answers, and its typed group.

    Comparison rows ──OutputSpec──► answers of the model [B, R] ──Measure──► loss, rewards, … of each item [K]
    update: the mean loss is minimised ─ evaluate: the means are reported

`preference_measure` gives the Measure of DPO and its kin; `pair_scores` and `step_scores` are those of reward
models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from hybridflow.algorithms.aggregation import masked_sum
from hybridflow.algorithms.preference import bradley_terry, dpo, ipo, kto, kto_reference_point, orpo, simpo
from hybridflow.config.preference import PreferenceConfig
from hybridflow.controller import Backend, Dispatch, register
from hybridflow.data.preference import CHOSEN, MISMATCHED
from hybridflow.distributed.process_group import gather_objects
from hybridflow.distributed.shards import bit_sum
from hybridflow.engines import BatchLimits, OutputSpec, TrainEngine
from hybridflow.models.output_spec import Outputs
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.actor import POLICY_COLUMNS
from hybridflow.workers.state import StatefulGroup, StatefulWorker

Measures = dict[str, Tensor]
"""Numbers by name, each [K] with its own K; `loss` is among them."""

Measure = Callable[[Outputs, DataProto], Measures]
"""(answers of the model, rows) -> numbers of each item; `loss` alone has a gradient that is used."""

COLUMNS = (*POLICY_COLUMNS, "loss_mask", "group_ids", "preference")
FURTHER = ("ref_log_prob_sum", "reference_point", "margin", "step_labels")
"""Columns that a measure reads where the run has them."""


def preference_measure(config: PreferenceConfig) -> Measure:
    """Return the loss of `algorithm.loss` on rows of answers, with the rewards that it implies.

    reward_chosen, reward_rejected: β·Δ with Δ the log-ratio to the reference (dpo, ipo, kto), β times the
    mean log-prob (simpo), the mean log-prob (orpo). accuracy: whether the chosen answer has the higher
    reward; of kto whether an answer's log-ratio is on its side of the reference point.
    """
    beta = config.beta
    if beta is None:
        beta = 2.0 if config.loss == "simpo" else 0.1

    def measure(answers: Outputs, batch: DataProto) -> Measures:
        rows = batch.batch
        mask = rows["loss_mask"]
        sums = masked_sum(answers["log_probs"], mask, dim=-1)
        lengths = mask.sum(-1)
        chosen, rejected = chosen_and_rejected(batch)
        if not config.needs_reference:
            rewards = sums / lengths.clamp(min=1)
            pair = (sums[chosen], sums[rejected], lengths[chosen], lengths[rejected])
            if config.loss == "orpo":
                return _measures(orpo(*pair, odds_weight=config.odds_weight), rewards, chosen, rejected)
            loss = simpo(*pair, beta=beta, margin=config.simpo_margin)
            return _measures(loss, beta * rewards, chosen, rejected)
        ratios = sums - rows["ref_log_prob_sum"]
        if config.loss == "kto":
            desirable = rows["preference"] == CHOSEN
            point = rows["reference_point"]
            loss = kto(
                ratios,
                desirable,
                point,
                beta=beta,
                desirable_weight=config.desirable_weight,
                undesirable_weight=config.undesirable_weight,
            )
            found = _measures(loss, beta * ratios, chosen, rejected)
            return found | {"accuracy": (ratios > point) == desirable}
        if config.loss == "ipo":
            loss = ipo(ratios[chosen], ratios[rejected], beta=beta)
        else:
            loss = dpo(ratios[chosen], ratios[rejected], beta=beta, label_smoothing=config.label_smoothing)
        return _measures(loss, beta * ratios, chosen, rejected)

    return measure


def pair_scores(answers: Outputs, batch: DataProto) -> Measures:
    """Return the Bradley–Terry loss of a reward model on pairs, and the scores, which are those of rows."""
    scores = answers["scores"].sum(-1)  # one of each row, the others are 0
    chosen, rejected = chosen_and_rejected(batch)
    margin = batch.batch.get("margin", None)
    if margin is not None:
        margin = margin[chosen]
    loss = bradley_terry(scores[chosen], scores[rejected], margin)
    return _measures(loss, scores, chosen, rejected)


def step_scores(answers: Outputs, batch: DataProto) -> Measures:
    """Return the cross-entropy of the score of each step with its label: −logσ(s) of a right step, −logσ(−s)
    of a wrong one.
    """
    ends = batch.batch["loss_mask"]
    scores = answers["scores"][ends]
    labels = batch.batch["step_labels"][ends]
    loss = binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return {"loss": loss, "accuracy": (scores > 0) == (labels > 0), "share_right": labels}


def chosen_and_rejected(batch: DataProto) -> tuple[Tensor, Tensor]:
    """Return the rows of chosen and of rejected answers, [K] int64 each; of pairs in the same order."""
    order = batch.batch["group_ids"].argsort(stable=True)
    chosen = batch.batch["preference"][order] == CHOSEN
    return order[chosen], order[~chosen]


def _measures(loss: Tensor, rewards: Tensor, chosen: Tensor, rejected: Tensor) -> Measures:
    found = {"loss": loss, "reward_chosen": rewards[chosen], "reward_rejected": rewards[rejected]}
    if len(chosen) == len(rejected):
        found["accuracy"] = rewards[chosen] > rewards[rejected]
    return found


class ComparisonWorker(StatefulWorker):
    """A worker that holds the engine of a model that learns from comparisons."""

    def __init__(self, engine: TrainEngine, spec: OutputSpec, measure: Measure, limits: BatchLimits) -> None:
        super().__init__(engine)
        self.spec = spec
        self.measure = measure
        self.limits = limits

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=COLUMNS)
    def update(self, batch: DataProto, *, count: int) -> Metrics:
        """Take one optimizer step on the rows of `batch`; `count` is the number of all its losses."""

        def loss(answers: Outputs, micro: DataProto) -> tuple[Tensor, Metrics]:
            measures = self.measure(answers, micro)
            return measures["loss"].sum() / count, _means(measures, "train")

        return self.engine.train_mini_batch(batch, self.spec, loss, self.limits)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS, reads=COLUMNS)
    def evaluate(self, batch: DataProto) -> Metrics:
        """Return the means of all measures over the rows of `batch`, as `val/…`."""
        return _means(self.measure(self.engine.forward(batch, self.spec, self.limits), batch), "val")

    @register(
        dispatch_mode=Dispatch.DP_COMPUTE_PROTO,
        reads=(*POLICY_COLUMNS, "loss_mask", "group_ids"),
        writes=("ref_log_prob_sum",),
    )
    def log_prob_sums(self, batch: DataProto, *, without_adapters: bool = False) -> DataProto:
        """Return ref_log_prob_sum [B] float32, nats: sums over the tokens of `loss_mask`, of the model as it
        is, or of the base below its adapters.
        """
        with self.engine.without_adapters() if without_adapters else nullcontext():
            answers = self.engine.forward(batch, self.spec, self.limits)
        sums = masked_sum(answers["log_probs"], batch.batch["loss_mask"], dim=-1)
        return DataProto.from_dict({"ref_log_prob_sum": sums})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def checksum(self) -> int:
        """Return a checksum of the bits of the weights that all ranks hold."""
        mine = sum(int(bit_sum(held.tensor, held.box)) for held in self.engine.held_weights())
        return sum(gather_objects(mine))


def _means(measures: Measures, prefix: str) -> Metrics:
    metrics = Metrics()
    for name, values in measures.items():
        metrics.add_mean(f"{prefix}/{name}", values.detach().sum(), values.numel())
    return metrics


class ComparisonGroup(StatefulGroup[ComparisonWorker]):
    """The driver's view of a model that learns from comparisons."""

    def __init__(self, backend: Backend, role: str) -> None:
        also: dict[Callable[..., Any], Sequence[str]] = {
            ComparisonWorker.update: FURTHER,
            ComparisonWorker.evaluate: FURTHER,
        }
        super().__init__(backend, role, also_read=also)

    def update(self, batch: DataProto) -> Metrics:
        """Take an optimizer step; returns the means of all measures as `train/…`."""
        rows = self._with_reference_point(batch)
        count = len(rows.batch["group_ids"].unique())
        if "step_labels" in rows:
            count = int(rows.batch["loss_mask"].sum())
        return self.call(ComparisonWorker.update, rows, count=count)

    def evaluate(self, batch: DataProto) -> Metrics:
        """See `ComparisonWorker.evaluate`."""
        return self.call(ComparisonWorker.evaluate, self._with_reference_point(batch))

    def _with_reference_point(self, batch: DataProto) -> DataProto:
        """Return rows with kto's reference point, made of the mismatched ones, which are taken out."""
        mismatched = batch.batch["preference"] == MISMATCHED
        if not bool(mismatched.any()):
            return batch
        other = batch.select_idxs(mismatched.nonzero().flatten())
        sums = self.call(ComparisonWorker.log_prob_sums, other).batch["ref_log_prob_sum"]
        point = kto_reference_point(sums - other.batch["ref_log_prob_sum"])
        rows = batch.select_idxs((~mismatched).nonzero().flatten())
        return rows | DataProto.from_dict({"reference_point": point.expand(len(rows)).clone()})
