"""Times follow from counts: worked by hand where they can be, and monotone where they must be."""

from __future__ import annotations

import math

import pytest

from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.costs import LAYER_OPERATIONS, Costs, Efficiency, Lengths, StepRows, cpu_costs
from hybridflow.planner.hardware import HARDWARE, Cluster, read_devices
from hybridflow.planner.memory import RoleEngine
from hybridflow.planner.model_shape import shape_of

H100 = HARDWARE["H100"]
PLAIN = Efficiency(1.0, 1.0, 1.0, decode_layer=0.0, update=0.0, pass_layer=0.0, links=1.0)
"""Programs that reach every peak."""
QWEN = shape_of("Qwen2.5-7B")
SPARSE = shape_of("Qwen3-30B-A3B")


def engine(max_tokens: int = 16384, *, recomputes: bool = True, **sizes: int) -> RoleEngine:
    """An engine that makes one optimizer step."""
    model = ModelConfig(enable_gradient_checkpointing=recomputes)
    layout = ParallelLayout(**sizes)
    return RoleEngine("actor", layout, FSDPConfig(), model, max_tokens=max_tokens, optimizer_steps=1)


def costs(devices: int = 1, efficiency: Efficiency = PLAIN) -> Costs:
    return Costs(Cluster(H100, devices), efficiency)


def test_a_decode_step_reads_the_weights_and_the_cache() -> None:
    table = QWEN.vocab * QWEN.hidden
    read = 2 * (QWEN.parameters - table) + 8 * 1000 * 2 * QWEN.kv_numbers
    sampled = 8 * QWEN.vocab * 32
    assert costs().decode_step(QWEN, 8, 1000, 1) == pytest.approx((read + sampled) / H100.bandwidth)


def test_experts_are_read_as_far_as_rows_reach_them() -> None:
    one = costs().decode_step(SPARSE, 1, 0, 1)
    many = costs().decode_step(SPARSE, 256, 0, 1)
    dense = SPARSE.parameters - SPARSE.expert_parameters - SPARSE.vocab * SPARSE.hidden
    read = 2 * (dense + SPARSE.expert_parameters * 8 / 128) + SPARSE.vocab * 32
    assert one == pytest.approx(read / H100.bandwidth)
    assert many > 5 * one


def test_a_pass_takes_its_flops_over_the_peak() -> None:
    rows = StepRows(64, 100, Lengths(400, 400))
    training = engine(recomputes=False)
    flops = 2.0 * QWEN.active * rows.tokens + QWEN.causal_flops(rows.tokens, rows.square)
    assert costs().passes(QWEN, rows, training, learns=False) == pytest.approx(flops / H100.peak)
    update = costs().passes(QWEN, rows, training, learns=True)
    stepping = QWEN.parameters * 100 / H100.bandwidth
    assert update == pytest.approx(3 * flops / H100.peak + stepping)


def test_halving_what_a_peak_gives_doubles_the_time() -> None:
    rows = StepRows(64, 100, Lengths(400, 400))
    training = engine(recomputes=False)
    half = Efficiency(0.5, 0.5, 1.0, 0.0, update=0.0, pass_layer=0.0, links=1.0)
    whole = costs().passes(QWEN, rows, training, learns=False)
    assert costs(1, half).passes(QWEN, rows, training, learns=False) == pytest.approx(2 * whole)


def test_stages_wait_for_each_other() -> None:
    rows = StepRows(64, 0, Lengths(1024, 1024))
    one = costs(4).passes(QWEN, rows, engine(1024, dp_replicate=4), learns=False)
    staged = costs(4).passes(QWEN, rows, engine(1024, pp=4), learns=False)
    assert staged == pytest.approx(one * (64 + 3) / 64)


def test_shards_are_gathered_over_the_slower_link() -> None:
    rows = StepRows(2, 0, Lengths(16, 16))
    inside = costs(8).passes(QWEN, rows, engine(dp_shard=8), learns=False)
    across = costs(16).passes(QWEN, rows, engine(dp_shard=16), learns=False)
    assert inside == pytest.approx(2 * QWEN.parameters / H100.link)
    assert across == pytest.approx(2 * QWEN.parameters / H100.network)


def test_experts_are_gathered_only_among_ranks_that_share_a_part() -> None:
    """Of so few tokens the time is that of parameters, and of as many small exchanges as layers have."""
    rows = StepRows(1, 0, Lengths(1, 1))
    experts = 2 * SPARSE.expert_parameters
    dense = 2 * SPARSE.parameters - experts
    exchanges = 2 * len(SPARSE.layers) * H100.link_latency

    def seconds(**sizes: int) -> float:
        return costs(8).passes(SPARSE, rows, engine(**sizes), learns=False)

    assert seconds(dp_shard=8) == pytest.approx((dense + experts) / H100.link, rel=0.01)
    assert seconds(dp_shard=8, ep=4) == pytest.approx((dense + experts / 4) / H100.link + exchanges, rel=0.01)
    assert seconds(dp_shard=8, ep=8) == pytest.approx(dense / H100.link + exchanges, rel=0.01)
    both = seconds(dp_shard=4, tp=2, ep=8)
    assert both == pytest.approx(dense / 2 / H100.link + 2 * exchanges, rel=0.01)


def test_copies_sum_their_shards_once_for_a_step() -> None:
    rows = StepRows(2, 0, Lengths(1, 1))
    one = costs(16).passes(QWEN, rows, engine(dp_shard=8), learns=True)
    two = costs(16).passes(QWEN, rows, engine(dp_replicate=2, dp_shard=8), learns=True)
    assert two - one == pytest.approx(2 * 4 * QWEN.parameters / 8 / H100.network, rel=0.01)


def test_a_longer_tail_costs_steps_and_refilled_rows_do_not_wait_for_it() -> None:
    def seconds(spread: float, *, refilled: bool = False) -> float:
        rows = StepRows(512, 100, Lengths(1000, 16000, spread))
        return costs(8).generation(QWEN, rows, 8, 1, refilled=refilled)

    assert seconds(0.0) < seconds(0.7) < seconds(1.2)
    assert seconds(1.2, refilled=True) < 0.5 * seconds(1.2)


def test_lengths_have_their_mean_and_their_limit() -> None:
    lengths = Lengths(1000, 4096, 0.8)
    points = [lengths.quantile((i + 0.5) / 4000) for i in range(4000)]
    assert sum(points) / 4000 == pytest.approx(1000, rel=0.01)
    assert max(points) == 4096 >= lengths.quantile(1 - 0.5 / 2048)
    assert lengths.square == pytest.approx(sum(p * p for p in points) / 4000, rel=0.02)


def test_segments_are_the_rows_that_still_run() -> None:
    rows = 400
    lengths = Lengths(1000, 8192, 0.8)
    total = sum((ends - begins) * running for begins, ends, running in lengths.segments(rows))
    assert total == pytest.approx(rows * 1000, rel=0.05)
    ends = [segment.ends for segment in lengths.segments(rows)]
    assert ends == sorted(ends) and ends[-1] == lengths.quantile(1 - 0.5 / rows)


def test_lengths_that_were_seen_are_taken_as_they_are() -> None:
    seen = Lengths.of([3, 1, 2, 10])
    assert (seen.mean, seen.quantile(0.875), seen.square) == (4, 10, (9 + 1 + 4 + 100) / 4)
    assert math.isclose(sum((e - b) * r for b, e, r in seen.segments(4)), 16, rel_tol=0.2)


def test_devices_are_read() -> None:
    cluster = read_devices("20xh100")
    assert cluster.nodes == [8, 8, 4] and cluster.hardware is H100


def test_a_pass_on_a_cpu_takes_its_operations_whatever_its_tokens() -> None:
    rows = StepRows(64, 100, Lengths(400, 400))
    found = cpu_costs(1, peak=1e11, bandwidth=1e10, memory=2**34, operation=4e-6)
    layers = len(QWEN.layers) + found.efficiency.outside
    micros = math.ceil(rows.tokens / 1024)
    whole = found.passes(QWEN, rows, engine(1024, recomputes=False), learns=True)
    of_tokens = found.of_tokens_alone.passes(QWEN, rows, engine(1024, recomputes=False), learns=True)
    assert whole - of_tokens == pytest.approx(3 * micros * layers * LAYER_OPERATIONS * 4e-6)
