"""Keys of the engine that generates: what cannot be is refused with what to set."""

from __future__ import annotations

import pytest
from possible_run import problem

from hybridflow.config import PPOConfig
from hybridflow.config.checks.cluster import validation_port
from hybridflow.config.checks.root import find_notes
from hybridflow.config.load import load_config, prepare_config
from hybridflow.config.needs import longest_row

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
SGLANG = f"{ROLLOUT}.name=sglang"
KEPT = f"{ROLLOUT}.recompute_kv_after_update=false"
APART = ("trainer.resource_pools={train: [1], gen: [1]}", "trainer.placement={rollout: gen}")
TWO = "trainer.n_gpus_per_node=2"


@pytest.mark.parametrize("engine", ["native", "hf", "vllm", "sglang"])
@pytest.mark.parametrize(
    ("agents", "longest"),
    [
        ([], 1024),
        ([f"{ROLLOUT}.multi_turn.enable=true"], 32768),
        (["data.environment=guess_number"], 32768),
        # rows of the data may name an agent that uses these
        ([f"{ROLLOUT}.multi_turn.function_tool_path=hybridflow.tools.calculator"], 32768),
    ],
)
def test_only_agents_make_rows_as_long_as_the_context_of_the_engine(
    base: list[str], engine: str, agents: list[str], longest: int
) -> None:
    context = [f"{ROLLOUT}.name={engine}", f"{ROLLOUT}.max_model_len=32768", "data.max_response_length=512"]
    limits = [
        f"{keys}_max_token_len_per_gpu={longest}"
        for keys in ("actor_rollout_ref.actor.ppo", f"{ROLLOUT}.log_prob", "critic.ppo", "critic.forward")
    ]
    config = prepare_config(PPOConfig, [*base, *context, *agents, *limits]).config
    assert longest_row(config)[0] == longest
    few = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
    assert f"{few}={longest - 1} tokens cannot hold one row of" in problem(
        base, *context, *agents, *limits, f"{few}={longest - 1}"
    )


def test_vllm_and_sglang_get_their_longest_row_and_native_needs_none(base: list[str]) -> None:
    sizes = [*base, "data.max_prompt_length=20", "data.max_response_length=30"]
    four = f"{ROLLOUT}.tensor_model_parallel_size=4"
    together = ["trainer.n_gpus_per_node=4", four]
    for keys, longest in (([VLLM, *together], 50), ([SGLANG], 50), ([], None)):
        config = prepare_config(PPOConfig, [*sizes, *keys]).config
        assert config.actor_rollout_ref.rollout.max_model_len == longest


def test_the_native_engine_reads_what_others_do_not(base: list[str]) -> None:
    keys = ("enable_prefix_caching=false", "enforce_eager=true", "kv_cache=paged")
    graphs = f"{ROLLOUT}.cudagraph_capture_sizes=[1,8]"
    read = prepare_config(PPOConfig, [*base, graphs, *(f"{ROLLOUT}.{key}" for key in keys)])
    assert read.config.actor_rollout_ref.rollout.cudagraph_capture_sizes == [1, 8]
    names = [key.partition("=")[0] for key in keys]
    assert not any(name in note for note in read.notes for name in names)


def test_keys_and_values_may_be_kept_on_a_pool_of_its_own(base: list[str]) -> None:
    prepared = prepare_config(PPOConfig, [*base, TWO, *APART, KEPT])
    assert not prepared.config.actor_rollout_ref.rollout.recompute_kv_after_update


def test_pushes_of_what_has_changed_are_told_where_no_weights_travel(base: list[str]) -> None:
    keys = [*base, TWO, f"{ROLLOUT}.delta_push=true"]
    assert any("delta_push is not read" in note for note in prepare_config(PPOConfig, keys).notes)
    for more in (APART, ["trainer.val_in_background=true"]):
        config = load_config(PPOConfig, [*keys, *more]).config
        assert not any("delta_push" in note for note in find_notes(config, set()))


@pytest.mark.parametrize(
    "more",
    [
        ["trainer.test_freq=-1", "trainer.val_before_train=false"],
        ["trainer.val_only=true"],
        ["trainer.schedule=exact_async"],
    ],
)
def test_a_port_of_agents_is_theirs_alone_where_no_validation_runs_beside_training(more: list[str]) -> None:
    keys = [f"{ROLLOUT}.agent.endpoint_port=9", "data.val_files=v.parquet", "trainer.schedule=fully_async"]
    assert list(validation_port(load_config(PPOConfig, keys).config))
    assert not list(validation_port(load_config(PPOConfig, [*keys, *more]).config))
