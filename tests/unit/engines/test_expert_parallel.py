"""Two and four ranks share the experts of a model and train as one process does, with replayed routes; live
routes may differ where two experts are nearly equal, which is counted.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_zoo import training_rows
from sharded_runs import Run, build, loss_of, weights_of, whole
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridflow.config.model import FSDPConfig
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.engines import BatchLimits, OutputSpec
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.models.copies.twin import Twin
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import ROUTES
from hybridflow.weight_sync.reshard import GatheredTwin
from ranks import Ranks

ASK = OutputSpec(log_probs=True, entropy=True, routes=True)
EXPERTS = {"experts": 2}
SLICED = {"tensor": 2, "experts": 2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = create_tiny_model(
        tmp_path_factory.mktemp("experts"),
        hidden=32,
        heads=4,
        kv_heads=2,
        intermediate=48,
        experts=4,
    )
    return Run(str(folder), grad_clip=None, steps=1)


@pytest.fixture(scope="module")
def routes(run: Run) -> Tensor:
    """The routes of one process."""
    rows = training_rows(dtype=torch.float32)
    return build(run, 1).forward(rows, ASK, run.limits)["routes"]


def step(rank: int, run: Run, world_size: int, routes: Tensor | None) -> Any:
    """One optimizer step on each rank's rows: the loss, what came of it, and where tokens went before."""
    engine = build(run, world_size)
    start = weights_of(engine)
    rows = training_rows(dtype=torch.float64)
    if routes is not None:
        rows |= DataProto.from_dict({ROUTES: routes})
    part = sorted(row for part in run.deal for row in part)
    if world_size > 1:
        part = list(run.deal[engine.layout.data_rank(rank_and_size()[0])])
    batch = rows.select_idxs(part)
    answers = engine.forward(batch, ASK, run.limits)
    metrics = engine.train_mini_batch(
        batch, OutputSpec(log_probs=True, entropy=True), loss_of(run, rows), run.limits
    )
    return {
        "start": start,
        "rows": part,
        "answers": answers,
        "metrics": metrics.to_floats(),
        "weights": weights_of(engine),
        "gradients": gradients(engine),
        "held": {
            name: tuple(p.to_local().shape if isinstance(p, DTensor) else p.shape)
            for name, p in engine.module.named_parameters()
        },
        "boxes": {held.name: held.box.shape for held in engine.held_weights()},
    }


def gradients(engine: FSDPEngine) -> dict[str, Tensor]:
    """The gradients of the only step, of which AdamW's mean has a tenth."""
    state = engine.state_dict()["optimizer"]
    return {name: 10 * whole(entry["exp_avg"]) for name, entry in state.items()}


def assert_close(ranks: list[Any], one: Any, bound: float) -> None:
    """The same answers, and gradients and weights within `bound` of their own size."""
    for found in ranks:
        for row, wanted in zip(found["rows"], range(len(found["rows"])), strict=True):
            theirs = one["answers"]["log_probs"][one["rows"].index(row)]
            assert (found["answers"]["log_probs"][wanted] - theirs).abs().max() < bound
        for name, gradient in one["gradients"].items():
            apart = (found["gradients"][name] - gradient).norm()
            assert apart <= bound * gradient.norm(), (name, float(apart))
    norms = [each["metrics"].get("actor/grad_norm") for each in (ranks[0], one)]
    assert norms[0] == pytest.approx(norms[1], rel=bound)


def test_two_ranks_share_experts(two_ranks: Ranks, run: Run, routes: Tensor) -> None:
    cut = replace(run, sizes=EXPERTS)
    one = step(0, run, 1, routes)
    ranks = two_ranks.run(step, cut, 2, routes)
    assert_close(ranks, one, 1e-5)
    name = "hf.model.layers.0.mlp.experts.gate_up_proj"
    assert one["held"][name][0] == 4 and [rank["held"][name][0] for rank in ranks] == [2, 2]
    assert ranks[0]["boxes"][name] == ranks[0]["held"][name]
    for key in ("load_entropy", "load_max", "flips", "without_route"):
        assert ranks[0]["metrics"][f"actor/moe/{key}"] == pytest.approx(one["metrics"][f"actor/moe/{key}"])
        assert f"actor/moe/{key}" not in ranks[1]["metrics"], "said once, not by rank"


def test_in_float64_the_weights_after_a_step_are_those_of_one_process(
    two_ranks: Ranks, run: Run, routes: Tensor
) -> None:
    wide = replace(run, model={"dtype": "float64"})
    one = step(0, wide, 1, routes)
    ranks = two_ranks.run(step, replace(wide, sizes=EXPERTS), 2, routes)
    assert_close(ranks, one, 1e-12)
    for name, weight in one["weights"].items():
        assert (ranks[0]["weights"][name] - weight).abs().max() < 1e-10
        assert not torch.equal(weight, one["start"][name])


def test_live_routes_and_recomputed_layers(two_ranks: Ranks, run: Run, routes: Tensor) -> None:
    """Without replay: flips are counted, and there are few; a layer that is recomputed exchanges again."""
    cut = replace(run, sizes=EXPERTS, model={"gradient_checkpointing": True})
    ranks = two_ranks.run(step, cut, 2, None)
    flips = 0
    for found in ranks:
        flips += int((found["answers"]["routes"] != routes[found["rows"]]).any(-1).sum())
    assert flips <= 2
    if not flips:
        assert_close(ranks, step(0, run, 1, None), 1e-5)


def generates_with(rank: int, run: Run) -> dict[str, Tensor]:
    engine = build(run, 2)
    dtypes = {held.name: held.compute_dtype for held in engine.held_weights()}
    twin = Twin(engine.policy, dtypes=dtypes, device=torch.device("cpu"))
    GatheredTwin(engine.held_weights, twin).acquire(0)
    return {name: parameter.detach() for name, parameter in twin.parameters.items()}


def test_generation_has_all_experts_on_each_rank(two_ranks: Ranks, run: Run) -> None:
    wanted = weights_of(build(run, 1))
    for weights in two_ranks.run(generates_with, replace(run, sizes=EXPERTS)):
        for name, weight in weights.items():
            assert torch.equal(weight, wanted[name]), name


@pytest.mark.parametrize("how", [{"lora": LoraSettings(2)}, {"sizes": {**EXPERTS, "sequence": 2}}])
def test_with_adapters_and_with_ulysses(
    two_ranks: Ranks, run: Run, routes: Tensor, how: dict[str, Any]
) -> None:
    cut = replace(run, **{"sizes": EXPERTS, **how})
    if "sizes" in how:
        cut = replace(cut, deal=(tuple(range(7)),))
    one = step(0, replace(cut, sizes={}), 1, routes)
    assert_close(two_ranks.run(step, cut, 2, routes), one, 1e-5)


def balanced(rank: int, run: Run, world_size: int, routes: Tensor | None) -> dict[str, Any]:
    """A step with the auxiliary loss: what is told of the experts' load, and gradients."""
    engine = build(run, world_size)
    engine.policy.follow_routes().balance_coef = 0.5
    rows = training_rows(dtype=run.dtype)
    if routes is not None:
        rows |= DataProto.from_dict({ROUTES: routes})
    spec = OutputSpec(log_probs=True, entropy=True)
    metrics = engine.train_mini_batch(rows, spec, loss_of(run, rows), run.limits).to_floats()
    return {
        "load": {name: value for name, value in metrics.items() if "/moe/" in name},
        "gradients": gradients(engine),
    }


def test_the_auxiliary_loss_weighs_the_same_in_one_pass_and_in_four(run: Run) -> None:
    """Of equal rows, since what it says of a pass depends on the tokens of that pass."""

    def trained(limits: BatchLimits, coef: float) -> dict[str, Tensor]:
        engine = build(replace(run, grad_clip=None), 1)
        engine.policy.follow_routes().balance_coef = coef
        rows = training_rows(dtype=run.dtype).select_idxs([0, 0, 0, 0])
        metrics = engine.train_mini_batch(
            rows, OutputSpec(log_probs=True, entropy=True), loss_of(run, rows), limits
        )
        assert metrics.to_floats()["actor/num_updates"] == 1.0
        return gradients(engine)

    one, four = BatchLimits(1000), BatchLimits(1000, max_rows=1)
    whole, cut, without = trained(one, 0.5), trained(four, 0.5), trained(one, 0.0)
    for name, gradient in whole.items():
        assert (cut[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-8, name
    assert any((without[name] - gradient).norm() > 1e-2 * gradient.norm() for name, gradient in whole.items())


@pytest.mark.parametrize(("attends", "replay"), [("ulysses", False), ("ulysses", True), ("ring", False)])
def test_ranks_that_share_rows_have_the_load_of_one_process(
    two_ranks: Ranks, run: Run, routes: Tensor, attends: Any, replay: bool
) -> None:
    """Parts of an odd number of tokens are filled up by a dummy, which counts nowhere."""
    assert {int(count) % 2 for count in training_rows().batch["attention_mask"].sum(1)} == {0, 1}
    wide = replace(run, model={"dtype": "float64"}, dtype=torch.float64, limits=BatchLimits(24, 1))
    given = torch.where(routes >= 0, 3 - routes, routes) if replay else None
    one = balanced(0, wide, 1, given)
    cut = replace(
        wide,
        sizes={"sequence": 2},
        deal=(tuple(range(7)),),
        fsdp=FSDPConfig(context_parallel=attends),
    )
    ranks = two_ranks.run(balanced, cut, 2, given)
    assert ranks[0]["load"] == pytest.approx(one["load"], rel=1e-12) and not ranks[1]["load"]
    assert {"actor/moe/balance_loss", "actor/moe/load_max"} <= set(one["load"])
    assert ("actor/moe/without_route" in one["load"]) == replay
    for name, gradient in one["gradients"].items():
        assert (ranks[0]["gradients"][name] - gradient).norm() <= 1e-12 * gradient.norm(), name


def refused(rank: int, run: Run) -> str:
    with pytest.raises(ModelError) as caught:
        build(run, 2)
    return str(caught.value)


def test_what_cannot_be_cut_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    sizes = {"hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 48}
    for name, experts, message in (("dense", 0, "has no experts"), ("odd", 3, "has 3 experts, which")):
        folder = create_tiny_model(tmp_path / name, experts=experts, **sizes)
        for text in two_ranks.run(refused, Run(str(folder), sizes=EXPERTS)):
            assert message in text and "expert_parallel_size" in text


def test_ranks_of_tensor_parallelism_share_experts(two_ranks: Ranks, run: Run, routes: Tensor) -> None:
    """Attention is cut, and experts are shared, by ranks that have the same rows."""
    wide = replace(run, model={"dtype": "float64"}, deal=(tuple(range(7)),))
    one = step(0, wide, 1, routes)
    ranks = two_ranks.run(step, replace(wide, sizes=SLICED), 2, routes)
    assert_close(ranks, one, 1e-10)
    for name, weight in one["weights"].items():
        assert (ranks[0]["weights"][name] - weight).abs().max() < 1e-10
        assert torch.equal(ranks[0]["weights"][name], ranks[1]["weights"][name]), "replicas stay the same"
    name = "hf.model.layers.0.mlp.experts.gate_up_proj"
    assert [rank["held"][name][0] for rank in ranks] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        EXPERTS,
        {"experts": 4},
        {"fsdp_size": 2, "experts": 2},
        SLICED,
        {"tensor": 2, "experts": 4},
        {**SLICED, "sequence": 2},
    ],
)
def test_four_ranks(four_ranks: Ranks, run: Run, routes: Tensor, sizes: dict[str, int]) -> None:
    """EP 2 × FSDP 2, EP 4, two copies of EP 2, and TP 2 with EP 2, EP 4 and CP 2."""
    deal = ((0, 4), (1, 5), (2, 6), (3,))
    if "tensor" in sizes:
        deal = ((0, 2, 4, 6), (1, 3, 5))
    if "sequence" in sizes:
        deal = (tuple(range(7)),)
    cut = replace(run, sizes=sizes, deal=deal)
    assert_close(four_ranks.run(step, cut, 4, routes), step(0, run, 1, routes), 1e-5)
