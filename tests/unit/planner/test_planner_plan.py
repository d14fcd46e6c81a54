"""Plans fit into memory, use all devices, and can be run: their overrides pass the checks of a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.errors import ConfigError
from hybridflow.explain.run import Plan as ExplainedPlan
from hybridflow.planner.costs import Costs
from hybridflow.planner.fitted import FITTED
from hybridflow.planner.hardware import read_devices
from hybridflow.planner.job import Job, job_of
from hybridflow.planner.known_models import shape_by_keys
from hybridflow.planner.overrides import overrides_of
from hybridflow.planner.pools import USABLE
from hybridflow.planner.search import Search, allocations, first_different, partitions, placement_name


def prepared(recipe: str, *words: str) -> PPOConfig:
    return prepare_config(
        PPOConfig, words, recipe=recipe, runs=False, needs_model=False, needs_files=False
    ).config


def job(recipe: str, model: str, *words: str) -> Job:
    config = prepared(recipe, f"actor_rollout_ref.model.path={model}", *words)
    return job_of(config, shape_by_keys, 256, 512)


def test_all_ways_to_share_devices_are_tried() -> None:
    found = [sorted(sorted(one) for one in each) for each in partitions(["a", "b", "c", "d"])]
    assert len(found) == 15 == len({str(each) for each in found})  # Bell's number


def test_devices_are_dealt_out_whole() -> None:
    cluster = read_devices("24xA100")
    found = list(allocations(cluster, [8, 4, 1]))
    assert found and all(sum(sizes) == 24 for sizes in found)
    assert all(size >= fewest for sizes in found for size, fewest in zip(sizes, (8, 4, 1), strict=True))
    assert (16, 4, 4) in found and (12, 4, 8) not in found


def test_names_are_those_of_the_paper() -> None:
    assert placement_name([["actor", "rollout", "critic"]]) == "colocated"
    assert placement_name([["actor", "rollout"], ["critic"], ["reference"]]) == "standalone"
    assert placement_name([["actor", "rollout", "reference"], ["critic", "reward_model"]]) == "split"
    assert placement_name([["actor", "critic"], ["rollout"]]) == "colocated, rollout alone"


@pytest.mark.parametrize(
    ("recipe", "model", "devices"),
    [
        ("grpo", "Qwen/Qwen3-8B", "16xH100"),
        ("ppo", "Qwen/Qwen2.5-7B", "8xA100"),
        ("dapo", "Qwen/Qwen2.5-32B", "32xH200"),
        ("grpo", "Qwen/Qwen3-30B-A3B", "12xMI300X"),
        ("rloo", "Qwen/Qwen2.5-0.5B", "1xH20"),
    ],
)
def test_the_best_plans_fit_and_their_overrides_pass_the_checks(
    recipe: str, model: str, devices: str
) -> None:
    cluster = read_devices(devices)
    planned = job(recipe, model)
    found = Search(planned, Costs(cluster, FITTED)).run()
    assert found.plans == sorted(found.plans, key=lambda plan: plan.seconds)
    for plan in first_different(found.plans)[:5]:
        assert plan.devices == cluster.devices
        assert sorted(role for pool in plan.pools for role in pool.roles) == sorted(planned.roles)
        most = max(size for pool in plan.pools for size in pool.memory.values())
        assert 0 < most < USABLE * cluster.hardware.memory
        words = [word.strip("'") for word in overrides_of(plan, cluster, planned)]
        config = prepared(recipe, f"actor_rollout_ref.model.path={model}", *words)
        there = ExplainedPlan.of(config)  # as the run itself places roles
        assert there.num_processes == cluster.devices
        for pool in plan.pools:
            for role in pool.roles:
                assert sum(p.world_size for p in there.placement.pools_of(role)) == pool.devices
        assert config.trainer.schedule == plan.schedule


def test_a_step_is_its_critical_path() -> None:
    found = Search(job("ppo", "Qwen2.5-7B"), Costs(read_devices("16xA100"), FITTED)).run()
    for plan in found.plans:
        stages = {"gen": 0.0, "prepare": 0.0, "update": 0.0}
        for pool in plan.pools:
            prepare = sum(pool.seconds.get(name, 0.0) for name in ("old_log_prob", "ref", "values"))
            update = sum(pool.seconds.get(name, 0.0) for name in ("update_critic", "update_actor"))
            stages["prepare"] = max(stages["prepare"], prepare)
            stages["update"] = max(stages["update"], update)
        training = stages["prepare"] + stages["update"]
        generating = plan.phases["gen"]
        apart = max(generating, training)
        together = generating + training
        expected = apart if plan.schedule in ("one_step_off", "fully_async") else together
        assert plan.seconds == pytest.approx(expected + plan.phases["update_weights"])


def test_what_does_not_fit_is_no_plan() -> None:
    assert not Search(job("ppo", "Llama-2-70B"), Costs(read_devices("2xA100"), FITTED)).run().plans


def test_a_model_of_two_layers_is_planned(tmp_path: Path) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    numbers = dict(zip(names, (64, 2, 4, 128, 300), strict=True))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **numbers}))
    assert Search(job("grpo", str(tmp_path)), Costs(read_devices("1xH100"), FITTED)).run().plans


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "grpo", "model=Qwen/Qwen3-8B", "--devices", "16xH100", "--best", "2"]
    assert main([*words, "--device-price", "2.5"]) == 0
    out = capsys.readouterr().out
    assert "price" in out and "trainer.nnodes=2" in out and "1  colocated" in out
    assert main(["plan", "--recipe", "grpo", "--devices", "4xH100"]) != 0
    assert main([*words[:5], "nonsense"]) != 0


def test_wrong_devices_are_refused() -> None:
    for words in ("H100", "0xH100", "8xT4"):
        with pytest.raises(ConfigError, match="known are A100"):
            read_devices(words)
    with pytest.raises(ConfigError, match="up to 2,048 devices"):
        read_devices("100000xH100")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--response-tokens", "nan"], "response-tokens nan: wanted a mean above 0"),
        (["--prompt-tokens", "-5"], "prompt-tokens -5: wanted a mean above 0"),
        (["--response-tokens", "1e9"], "at most data.max_response_length"),
        (["--reward-seconds", "-3"], "reward-seconds -3: wanted a number from 0 on"),
        (["--device-price", "inf"], "device-price inf: wanted"),
        (["--best", "0"], "at least 1"),
        (["--schedule", "foo"], "schedule foo: plans compare sync, one_step_off"),
    ],
)
def test_odd_options_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "grpo", "model=Qwen/Qwen3-8B", "--devices", "16xH100", *words]) == 1
    assert said in capsys.readouterr().err
