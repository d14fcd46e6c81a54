"""Plans fit into memory, use all devices, and can be run: their overrides pass the checks of a run."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hybridflow.cli.main import main
from hybridflow.config import PPOConfig
from hybridflow.config.layout import RoleLayout, engine_keys
from hybridflow.config.load import prepare_config
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.tree import with_values
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.errors import ConfigError
from hybridflow.explain.run import placed
from hybridflow.planner.costs import FITTED, Costs
from hybridflow.planner.hardware import Cluster, read_devices
from hybridflow.planner.memory import (
    DEQUANTIZING_BYTES,
    NF4_BYTES,
    RoleEngine,
    engine_needs,
    generation_needs,
    phases_of_pool,
)
from hybridflow.planner.model_shape import known_models, shape_by_keys, shape_of
from hybridflow.planner.pools import USABLE, PoolPlanner, StepWork, job_of
from hybridflow.planner.run_plan import PlannedReplica, PoolPlan, RunPlan
from hybridflow.planner.search import PlacementSearch, allocations, first_different, partitions

SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 300,
}


def prepared(recipe: str, *words: str) -> PPOConfig:
    return prepare_config(
        PPOConfig, words, recipe=recipe, runs=False, needs_model=False, needs_files=False
    ).config


def job(recipe: str, model: str, *words: str) -> StepWork:
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


@pytest.mark.parametrize("devices", [6, 10, 12, 14, 20, 22])
def test_every_number_of_devices_can_be_one_pool(devices: int) -> None:
    cluster = read_devices(f"{devices}xH100")
    assert list(allocations(cluster, [1])) == [(devices,)]
    for sizes in allocations(cluster, [1, 1, 1]):
        assert sum(sizes) == devices and cluster.holds(sizes)


def test_a_pool_has_whole_nodes_and_one_part() -> None:
    cluster = read_devices("22xH100")
    assert cluster.nodes == [8, 8, 6]
    assert cluster.holds((22,)) and cluster.holds((8, 14)) and cluster.holds((6, 8, 4, 4))
    assert not cluster.holds((6, 6, 6, 4)), "four devices are left, two on each of two nodes"


def test_names_are_those_of_the_paper() -> None:
    def named(*sets: str) -> str:
        pools = [PoolPlan(roles, tuple(roles.split()), (1,), {}) for roles in sets]
        return RunPlan(PPOConfig(), tuple(pools)).placement

    assert named("actor rollout critic") == "colocated"
    assert named("actor rollout", "critic", "reference") == "standalone"
    assert named("actor rollout reference", "critic reward_model") == "split"
    assert named("actor critic", "rollout") == "colocated, rollout alone"


@pytest.mark.parametrize(
    ("recipe", "model", "devices"),
    [
        ("grpo", "Qwen/Qwen3-8B", "16xH100"),
        ("ppo", "Qwen/Qwen2.5-7B", "8xA100"),
        ("dapo", "Qwen/Qwen2.5-32B", "32xH200"),
        ("grpo", "Qwen/Qwen3-30B-A3B", "12xMI300X"),
        ("grpo", "Qwen/Qwen3-8B", "14xH100"),
        ("rloo", "Qwen/Qwen2.5-0.5B", "1xH20"),
    ],
)
def test_the_best_plans_fit_and_their_overrides_pass_the_checks(
    recipe: str, model: str, devices: str
) -> None:
    cluster = read_devices(devices)
    planned = job(recipe, model)
    found = PlacementSearch(planned, Costs(cluster, FITTED)).run()
    assert found.plans == sorted(found.plans, key=lambda plan: plan.seconds)
    assert any(len(plan.pools) == 1 for plan in found.plans)
    for plan in first_different(found.plans)[:5]:
        assert plan.devices == cluster.devices
        assert sorted(role for pool in plan.pools for role in pool.roles) == sorted(planned.roles)
        most = max(size for pool in plan.pools for size in pool.memory.values())
        assert 0 < most < USABLE * cluster.hardware.memory
        words = [word.strip("'") for word in plan.overrides(cluster)]
        config = prepared(recipe, f"actor_rollout_ref.model.path={model}", *words)
        there = placed(config)  # as the run itself places roles
        assert there.devices == cluster.devices
        for pool in plan.pools:
            for role in pool.roles:
                assert sum(p.devices for p in there.pools_of(role)) == pool.devices
        assert config.trainer.schedule == plan.schedule


@pytest.mark.parametrize(("model", "devices"), [("Qwen/Qwen3-8B", "8xH100"), ("Qwen/Qwen2.5-32B", "32xH200")])
def test_a_replica_that_validates_has_devices_of_its_own(model: str, devices: str) -> None:
    cluster = read_devices(devices)
    keys = ("trainer.val_in_background=true", "data.val_files=v.parquet")
    found = PlacementSearch(job("grpo", model, *keys), Costs(cluster, FITTED)).run()
    passed = 0
    for plan in first_different(found.plans):
        *others, validation = plan.pools
        assert validation.roles == ("validation",) and plan.devices == cluster.devices
        assert validation.devices == plan.ranks_of_replica and not validation.seconds
        assert 0 < max(validation.memory.values()) < USABLE * cluster.hardware.memory
        fewer = Costs(Cluster(cluster.hardware, cluster.devices - validation.devices), FITTED)
        without = PlacementSearch(job("grpo", model), fewer).run().plans
        assert any(each.pools == tuple(others) and each.seconds == plan.seconds for each in without)
        words = [word.strip("'") for word in plan.overrides(cluster)]
        try:
            config = prepared("grpo", f"actor_rollout_ref.model.path={model}", *keys, *words)
        except ConfigError:
            continue  # a batch that so many devices cannot share: the command leaves the plan out
        passed += 1
        there = placed(config)
        assert there.devices == cluster.devices
        (own,) = there.pools_of("validation")
        assert own.devices == validation.devices and own.replica is not None and not own.engines
    assert passed


def test_a_step_is_its_critical_path() -> None:
    found = PlacementSearch(job("ppo", "Qwen2.5-7B"), Costs(read_devices("16xA100"), FITTED)).run()
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


def layouts_of(model: str, devices: str, *words: str) -> Iterator[RoleLayout]:
    """The layouts that are tried for the actor, as the checks of a run see them."""
    planned = job("grpo", model, *words)
    costs = Costs(read_devices(devices), FITTED)
    _, sequence, keys = engine_keys(planned.config, "actor")
    for fsdp in PoolPlanner(planned, costs).layouts("actor", costs.cluster.devices):
        yield RoleLayout("actor", fsdp, sequence, keys, costs.cluster.devices)


@pytest.mark.parametrize("devices", ["8xH100", "12xH100", "16xH100", "20xH100"])
@pytest.mark.parametrize("model", ["Qwen3-30B-A3B", "GLM-4.5-Air", "Qwen3-8B"])
def test_layouts_are_those_that_the_checks_allow(model: str, devices: str) -> None:
    shape = shape_of(model)
    found = list(layouts_of(model, devices))
    for each in found:
        assert not list(each.problems()), str(each)
        fsdp = each.fsdp
        if shape.experts:
            assert fsdp.tensor_parallel_size == 1 or fsdp.expert_parallel_size > 1
            rest = each.cut[1] * fsdp.tensor_parallel_size // fsdp.expert_parallel_size
            # FSDP cuts the second dimension of the tensors [E, 2I, H] and [E, H, I] of a part
            assert fsdp.expert_parallel_size == 1 or shape.hidden % rest == 0
    pairs = {(each.fsdp.tensor_parallel_size, each.fsdp.expert_parallel_size) for each in found}
    assert ((2, 4) in pairs) == bool(shape.experts)


def test_what_cannot_be_cut_is_not_cut(tmp_path: Path) -> None:
    facts = known_models()["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps(facts | {"model_type": "gpt_oss"}))
    sizes = {each.fsdp.tensor_parallel_size for each in layouts_of(str(tmp_path), "8xH100")}
    assert sizes == {1}
    adapters = layouts_of("Qwen3-8B", "8xH100", "actor_rollout_ref.model.lora_rank=8")
    assert {each.fsdp.tensor_parallel_size for each in adapters} == {1}
    compiled = layouts_of(
        "Qwen3-30B-A3B", "8xH100", "actor_rollout_ref.actor.fsdp_config.use_torch_compile=true"
    )
    assert {each.fsdp.expert_parallel_size for each in compiled} == {1}


def test_weights_in_4_bits_are_whole_on_each_device_and_take_less_of_it(tmp_path: Path) -> None:
    adapters = ("actor_rollout_ref.model.lora_rank=16",)
    quantized = (*adapters, "actor_rollout_ref.model.quantization=nf4")
    layouts = [each.fsdp for each in layouts_of("Qwen2.5-7B", "8xH100", *quantized)]
    assert layouts and all(each.pipeline_parallel_size == each.tensor_parallel_size == 1 for each in layouts)
    costs = Costs(read_devices("1xH100"), FITTED)
    found = {}
    for words in (adapters, quantized):
        planner = PoolPlanner(job("grpo", "Qwen2.5-7B", *words), costs)
        (option,) = planner.options("actor", 1)[:1]
        found[words] = {part.label: part.size for part in option.needs.parts}
        assert (planner.plan(("rollout",), 1) is None) == (words == quantized), "the actor's module generates"
        assert planner.plan(("reference",), 1) is None or words != quantized, "the actor's module refers"
        assert planner.plan(("actor", "rollout"), 1) is not None
    shape = shape_of("Qwen2.5-7B")
    layers = sum(linear.size for layer in shape.layers for linear in layer.linears)
    saved = found[adapters]["weights"] - found[quantized]["weights"]
    assert saved == pytest.approx(layers * (2 - 0.5625), rel=0.1)
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "rank_pattern": {"q_proj": 16}}')
    read = (f"actor_rollout_ref.model.lora_adapter_path={tmp_path}", quantized[1])
    (option,) = PoolPlanner(job("grpo", "Qwen2.5-7B", *read), costs).options("actor", 1)[:1]
    assert {part.label: part.size for part in option.needs.parts} == found[quantized]


def test_two_ranks_that_generate_keep_the_codes_of_an_offloaded_actor() -> None:
    """The rest of the weights is gathered; of the codes there is the actor's copy."""
    size = shape_of("Qwen2.5-7B").size(lora_rank=16, quantized=True)
    model = ModelConfig(lora_rank=16, quantization="nf4")
    fsdp = FSDPConfig(param_offload=True)
    actor = engine_needs(
        RoleEngine("actor", ParallelLayout(dp_shard=2), fsdp, model, True, 8, 64, 64), size, device="cuda"
    )
    codes = size.quantized * NF4_BYTES + size.largest_quantized * DEQUANTIZING_BYTES
    assert actor.shared == pytest.approx(codes) and actor.fetched > actor.shared
    generation = generation_needs(size, PlannedReplica(1, 8, 64, None, 1), alone=False, devices=2)
    assert generation.parts[0].size == 2 * (size.whole.all - size.quantized)
    phases = phases_of_pool({"actor": actor, "generation": generation}, 2)
    assert phases["generating"] == actor.between + generation.update + actor.shared


def test_a_mixture_that_is_short_of_memory_has_both() -> None:
    """On eight nodes the options that need least memory share experts among ranks that cut dense layers."""
    pools = PoolPlanner(job("grpo", "Qwen3-235B-A22B"), Costs(read_devices("64xH100"), FITTED))
    found = [option.engine.layout for option in pools.options("actor", 64)]
    assert any(layout.tp > 1 and layout.ep > 1 for layout in found)


def test_a_reference_without_adapters_takes_no_memory_beside_the_actor() -> None:
    words = ("actor_rollout_ref.model.lora_rank=16",)
    costs = Costs(read_devices("1xH100"), FITTED)
    together = PoolPlanner(job("grpo", "Qwen2.5-7B", *words), costs).plan(
        ("actor", "rollout", "reference"), 1
    )
    alone = PoolPlanner(job("grpo", "Qwen2.5-7B", *words), costs).plan(("actor", "rollout"), 1)
    assert together is not None and alone is not None
    assert together.memory == alone.memory and "ref" in together.seconds


def test_a_judge_takes_memory_on_whole_replicas_and_no_phase_of_its_own() -> None:
    words = (
        *("reward.reward_model.enable=true", "reward.reward_model.kind=generative", "reward.function=judge"),
        *("reward.reward_model.model.path=Qwen2.5-7B", "reward.reward_model.rollout.max_num_seqs=8"),
    )
    width = ("reward.reward_model.rollout.tensor_model_parallel_size=2",)
    pools = ("trainer.resource_pools={a: [1], b: [2]}", "trainer.placement={judge: b}")
    costs = Costs(read_devices("4xH100"), FITTED)
    judged = job("grpo", "Qwen2.5-0.5B", *words)
    assert "judge" in judged.roles
    together = PoolPlanner(judged, costs).plan(("actor", "rollout", "judge"), 1)
    alone = PoolPlanner(judged, costs).plan(("actor", "rollout"), 1)
    assert together is not None and alone is not None
    assert together.memory["updating"] - alone.memory["updating"] > 2 * 7e9  # bfloat16
    assert together.seconds == alone.seconds
    wide = PoolPlanner(job("grpo", "Qwen2.5-0.5B", *words, *width, *pools), costs)
    assert wide.plan(("judge",), 1) is None and wide.plan(("judge",), 2) is not None


MEGATRON = ("actor_rollout_ref.actor.strategy=megatron", "critic.strategy=megatron")


def test_megatron_holds_weights_and_gradients_whole_and_shares_the_rest() -> None:
    """By hand, for Qwen2.5-7B in bfloat16: two stages of 14 layers, halved by two ranks, on 16 devices."""
    shape = shape_of("Qwen2.5-7B")
    size = shape.size(itemsize=2)
    layout = ParallelLayout.from_keys(16, -1, 1, 2, 2)
    table = 152064 * 3584
    # biases and norms of layers are whole on each rank
    layer = (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944) / 2 + 3584 + 2 * 512 + 2 * 3584
    own = 14 * layer + table / 2
    model = ModelConfig(path="Qwen2.5-7B")
    engine = RoleEngine("actor", layout, FSDPConfig(), model, True, 64, 1024, strategy="megatron")
    needs = engine_needs(engine, size, device="cuda")
    found = {part.label: part.size for part in needs.parts}
    wanted = {"weights": 2, "gradients": 4, "float32 masters": 4 / 4, "Adam moments": 8 / 4}
    for label, each in wanted.items():
        assert found[label] == pytest.approx(each * own, rel=1e-3), label
    assert (
        needs.between == pytest.approx(9 * own, rel=1e-3)
        and needs.update == sum(found.values()) - needs.between
    )
    frozen = replace(engine, trained=False)
    assert engine_needs(frozen, size, device="cuda").between == found["weights"]
    alone = replace(engine, layout=ParallelLayout())
    assert engine_needs(alone, size, device="cuda") == engine_needs(
        replace(alone, strategy="fsdp2"), size, device="cuda"
    )


def test_a_family_that_megatron_core_does_not_train_has_no_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "grpo", "model=GLM-4.5-Air", MEGATRON[0]]
    assert main([*words, "--devices", "64xH100"]) == 1
    said = capsys.readouterr().err
    assert "does not serve this model of model_type 'glm4_moe': only llama, mistral" in said
    assert "Set strategy=fsdp2" in said


def test_plans_of_megatron_are_by_the_key_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """megatron-core is not installed here; its roles have one layout, and nothing that it does not do."""
    words = ["plan", "--recipe", "ppo", "model=Qwen2.5-7B", "--devices", "16xH100", "--best", "3"]
    kl = "actor_rollout_ref.actor.use_kl_loss=true"
    assert main([*words, kl, *MEGATRON]) == 0
    out = capsys.readouterr().out
    assert "offload" not in out and "fsdp_size" not in out
    assert main([*words, kl]) == 0
    assert capsys.readouterr().out != out, "memory and layouts are its own"
    assert main([*words, kl, *MEGATRON, "actor_rollout_ref.model.lora_rank=8"]) == 1
    assert "strategy=megatron does not go with actor_rollout_ref.model.lora_rank=8" in capsys.readouterr().err
    planned = job("ppo", "Qwen2.5-7B", kl)
    asked = with_values(planned.config, {word.partition("=")[0]: "megatron" for word in MEGATRON})
    planner = PoolPlanner(replace(planned, config=asked), Costs(read_devices("16xH100"), FITTED))
    pool = planner.plan(("actor", "rollout", "critic", "reference"), 16)
    assert pool is not None and {engine.strategy for engine in pool.engines.values()} == {"megatron"}
    assert len({engine.layout for engine in pool.engines.values()}) == 1
    experts = replace(job("grpo", "Qwen3-30B-A3B"), config=asked)
    layouts = PoolPlanner(experts, Costs(read_devices("8xH100"), FITTED)).layouts("actor", 8)
    assert {fsdp.tensor_parallel_size for fsdp in layouts} == {1}


def test_seconds_of_weights_in_4_bits_are_told_to_be_too_few(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "grpo", "model=Qwen2.5-7B", "--devices", "1xH100", "--best", "1"]
    adapters = "actor_rollout_ref.model.lora_rank=16"
    assert main([*words, adapters]) == 0 and "4 bits" not in capsys.readouterr().out
    assert main([*words, adapters, "actor_rollout_ref.model.quantization=nf4"]) == 0
    assert "these seconds leave out that weights in 4 bits are dequantized" in capsys.readouterr().out


def test_what_does_not_fit_is_no_plan() -> None:
    assert not PlacementSearch(job("ppo", "Llama-2-70B"), Costs(read_devices("2xA100"), FITTED)).run().plans


def test_a_model_of_two_layers_is_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert PlacementSearch(job("grpo", str(tmp_path)), Costs(read_devices("1xH100"), FITTED)).run().plans


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "grpo", "model=Qwen/Qwen3-8B", "--devices", "16xH100", "--best", "2"]
    assert main([*words, "--device-price", "2.5"]) == 0
    out = capsys.readouterr().out
    assert "price" in out and "trainer.nnodes=2" in out and "1  colocated" in out
    assert max(map(len, out.splitlines())) <= 80, "every terminal shows all of it"


def test_lines_of_overrides_are_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "grpo", "model=Qwen2.5-7B", "--devices", "12xH100", "--device-price", "2"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "'trainer.resource_pools={train: [8, 4]}'" in out and max(map(len, out.splitlines())) <= 80
    blocks = [block.splitlines() for block in out.split("\n\n") if "trainer.device" in block]
    assert len(blocks) == 5
    for block in blocks:
        first = next(index for index, line in enumerate(block) if "trainer.device" in line)
        command = "printf '%s\\n' " + "\n".join(block[first:])
        given = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout
        assert len(given.splitlines()) >= 4 and all("=" in word for word in given.splitlines())


def test_this_machine_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    words = ["plan", "--recipe", "grpo", f"model={tmp_path}", "--devices", "1xCPU"]
    assert main([*words, "data.max_prompt_length=64", "data.max_response_length=64"]) == 0
    out = capsys.readouterr().out
    assert "1 × CPU" in out and "trainer.device=cpu" in out and "offload" not in out


def test_replicas_of_vllm_have_whole_heads_of_queries_and_cut_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Heads of keys and values are held on several devices where there are more devices than heads."""
    words = "--recipe grpo --devices 128xH20 --best 1 actor_rollout_ref.rollout.name=vllm"
    assert main(["plan", "model=Qwen3-235B-A22B", *words.split()]) == 0
    assert "tensor_model_parallel_size=8" in capsys.readouterr().out
    for heads, wanted in ((28, {1, 2, 4}), (64, {1, 2, 4, 8, 16})):
        pools = PoolPlanner.__new__(PoolPlanner)
        shape = SimpleNamespace(heads=heads, kv_heads=4)
        rollout = SimpleNamespace(rollout=SimpleNamespace(name="vllm"))
        config = SimpleNamespace(actor_rollout_ref=rollout)
        pools.job = SimpleNamespace(shapes={"actor": shape}, config=config)  # type: ignore[assignment]
        assert {size for size in (1, 2, 4, 8, 16) if pools.generates_by(size)} == wanted


QWEN = "model=Qwen/Qwen3-8B --devices 16xH100"
REFUSALS = {
    "model=Qwen2.5-7B --devices 1xH100": "Use 2xH100, on which they fit, LoRA",
    "model=Qwen3-235B-A22B --devices 64xH100": "at most 1 × H100 here, which cannot hold the 438",
    "model=Llama-3.1-405B --devices 8xA100": "at most 8 × A100 here",
    "model=Qwen2.5-0.5B --devices 1xH100 --schedule one_step_off": "leave --schedule out",
    "model=Qwen3.5-9B --devices 8xH100": "linear attention in 24 of its 32 layers",
    "model=Qwen3-8B --devices 8xH100 trainer.nnodes=0": "trainer.nnodes",
    "model=Qwen3-8B --devices H100": "known are A100",
    "model=Qwen3-8B --devices 0xH100": "known are A100",
    "model=Qwen3-8B --devices 8xT4": "known are A100",
    "model=Qwen3-8B --devices 100000xH100": "up to 2,048 devices",
    "model=Qwen3-8B": "say for which devices",
    "--devices 4xH100": "say for which model",
    f"{QWEN} --response-tokens nan": "response-tokens nan: wanted a mean above 0",
    f"{QWEN} --prompt-tokens -5": "prompt-tokens -5: wanted a mean above 0",
    f"{QWEN} --response-tokens 1e9": "at most data.max_response_length",
    f"{QWEN} --reward-seconds -3": "reward-seconds -3: wanted a number from 0 on",
    f"{QWEN} --device-price inf": "device-price inf: wanted",
    f"{QWEN} --best 0": "at least 1",
    f"{QWEN} --schedule foo": "schedule foo: plans compare sync, one_step_off",
    f"{QWEN} nonsense": "nonsense",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_what_must_change_is_said(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--recipe", "grpo", *words.split()]) == 1
    assert REFUSALS[words] in capsys.readouterr().err
