"""The run of one process and that of two under a Ray of their own log the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import echo_world
import pytest
import torch
from ray_runs import OF_EACH_PROCESS, assert_alike, under_ray
from tiny_run import Inputs, metrics_of, small_run
from transformers import AutoModelForSequenceClassification

from hybridflow.models.tiny import create_tiny_model
from hybridflow.trainer.main_ppo import main
from verl_commands import FLAGS, MOE_GRPO

TWO = ("trainer.n_gpus_per_node=2",)
QLORA = (
    *("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"),
    "actor_rollout_ref.model.quantization=nf4",
)


def metrics_of_both(
    inputs: Inputs,
    folder: Path,
    keys: Sequence[str],
    of_two: Sequence[str] = (),
    command: Sequence[str] = (),
) -> list[dict[int, dict[str, float]]]:
    """Run in one process and, beside it, in two under Ray, with `of_two` besides; return what each logged.

    Keys of a `command` hold where nothing else is said.
    """
    two = under_ray(folder / "log", [*command, *small_run(inputs, folder / "two", *keys, *TWO, *of_two)])
    try:
        assert main([*command, *small_run(inputs, folder / "one", *keys)]) == 0
        done = two.wait()
        assert done.returncode == 0 and "2 worker processes on" in done.output, done.output
    finally:
        two.kill()
    found = [metrics_of(folder / name) for name in ("one", "two")]
    assert [sorted(metrics) for metrics in found] == [[1, 2], [1, 2]]
    return found


@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize(
    "more",
    [
        (),
        pytest.param(echo_world.KEYS, marks=pytest.mark.slow),
        pytest.param(QLORA, id="a base in 4 bits", marks=pytest.mark.slow),
    ],
)
def test_two_processes_log_what_one_does(inputs: Inputs, tmp_path: Path, more: tuple[str, ...]) -> None:
    # two processes cannot be exact, and what one in exact mode logs is more
    keys = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.exact=false",
        *more,
    )
    profiled = ("global_profiler.tool=phases", "global_profiler.steps=[2]")
    one, got = metrics_of_both(inputs, tmp_path, keys, profiled)
    check_trace(tmp_path / "two" / "profile" / "step_2.json")
    assert_alike(one, got, without=(*OF_EACH_PROCESS, *(echo_world.OF_THE_WAY if more else ())))


def check_trace(file: Path) -> None:
    """Fail where a profile is not one trace whose ranks work while the driver waits for them."""
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["actor 0", "actor 1", "driver"]
    spans = {
        (names[event["pid"]], event["name"]): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X"
    }
    begin, end = spans["driver", "update_actor"]
    ranks = [spans[f"actor {rank}", "actor.update_mini_batch"] for rank in (0, 1)]
    for start, stop in ranks:
        assert begin <= start < stop <= end, "the clock is that of one machine"
    assert max(start for start, _ in ranks) < min(stop for _, stop in ranks), "side by side"


MEGATRON = (
    "--config-path=./config",
    "--config-name=ppo_megatron_trainer.yaml",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=1",
    "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size=null",
    "actor_rollout_ref.actor.megatron.use_dist_checkpointing=True",
    "+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full",
    "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
    "critic.strategy=megatron",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_documented_megatron_command_in_two_stages(inputs: Inputs, tmp_path: Path) -> None:
    keys = (
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.exact=false",
    )
    one, got = metrics_of_both(inputs, tmp_path, keys, MEGATRON)
    assert "run by PyTorch's own engine" in (tmp_path / "log").read_text()
    assert_alike(one, got, without=OF_EACH_PROCESS)


def sized(tensor: int, experts: int) -> list[str]:
    """Sizes of the actor and the reference, in verl's words."""
    sizes = {"pipeline": 1, "tensor": tensor, "expert": experts}
    return [
        f"actor_rollout_ref.{role}.megatron.{name}_model_parallel_size={size}"
        for role in ("actor", "ref")
        for name, size in sizes.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_the_documented_command_of_a_mixture_of_experts(inputs: Inputs, tmp_path: Path) -> None:
    """Word by word but for sizes, model and engine; routes of generation are replayed, else some may flip."""
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 64}
    model = create_tiny_model(tmp_path / "model", experts=4, **sizes)
    keys = (
        "actor_rollout_ref.rollout.exact=false",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay=true",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        *sized(1, 1),
    )
    command = [*FLAGS, *MOE_GRPO.split()]
    one, got = metrics_of_both(replace(inputs, model=model), tmp_path, keys, sized(2, 2), command)
    assert "run by PyTorch's own engine" in (tmp_path / "log").read_text()
    assert_alike(one, got, without=OF_EACH_PROCESS)
    for metrics in one.values():
        assert metrics["actor/moe/without_route"] > 0 and metrics["actor/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("ray")
def test_a_reward_model_scores_alike_on_two_processes(inputs: Inputs, tmp_path: Path) -> None:
    classifier = tmp_path / "classifier"
    shutil.copytree(inputs.model, classifier)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        hf = AutoModelForSequenceClassification.from_pretrained(classifier, num_labels=1)
        torch.nn.init.normal_(hf.score.weight)
    hf.save_pretrained(classifier)
    keys = (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.exact=false",
        "reward.custom_reward_function.path=null",
        "reward.reward_model.enable=true",
        f"reward.reward_model.model.path={classifier}",
    )
    one, got = metrics_of_both(inputs, tmp_path, keys)
    names = [name for name in one[1] if name.startswith("critic/score/") or "reward_model_score" in name]
    assert "critic/score/mean" in names and one[1]["critic/score/max"] > one[1]["critic/score/min"]
    assert_alike(*({step: {name: run[step][name] for name in names} for step in run} for run in (one, got)))
