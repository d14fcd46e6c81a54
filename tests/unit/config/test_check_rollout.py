"""Keys of the engine that generates: what cannot be is refused with what to set."""

from __future__ import annotations

import pytest
from possible_run import problem

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
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


def test_vllm_gets_its_longest_row_and_native_says_what_it_does_not_need(base: list[str]) -> None:
    sizes = ["data.max_prompt_length=20", "data.max_response_length=30"]
    config = prepare_config(
        PPOConfig, [*base, *sizes, VLLM, f"{ROLLOUT}.tensor_model_parallel_size=4"]
    ).config
    assert config.actor_rollout_ref.rollout.max_model_len == 50
    assert (
        prepare_config(PPOConfig, [*base, *sizes, SGLANG]).config.actor_rollout_ref.rollout.max_model_len
        == 50
    )
    native = prepare_config(
        PPOConfig,
        [*base, *sizes, f"{ROLLOUT}.engine_kwargs.vllm.swap_space=4", f"{ROLLOUT}.load_format=auto"],
    )
    assert native.config.actor_rollout_ref.rollout.max_model_len is None
    (note,) = [note for note in native.notes if "does not read" in note]
    assert f"{ROLLOUT}.load_format" in note and f"{ROLLOUT}.engine_kwargs" in note
    both = [f"{ROLLOUT}.enable_prefix_caching=false", f"{ROLLOUT}.enforce_eager=true"]
    read = prepare_config(PPOConfig, [*base, *both])
    # by the native engine too
    assert not any("enable_prefix_caching" in note or "enforce_eager" in note for note in read.notes)
    unread = prepare_config(PPOConfig, [*base, f"{ROLLOUT}.name=hf", *both])
    assert any("enable_prefix_caching" in note and "enforce_eager" in note for note in unread.notes)
    sizes = [f"{ROLLOUT}.cudagraph_capture_sizes=[1,8]"]
    assert prepare_config(
        PPOConfig, [*base, *sizes]
    ).config.actor_rollout_ref.rollout.cudagraph_capture_sizes == [1, 8]
    assert any(
        "compilation_config" in note for note in prepare_config(PPOConfig, [*base, VLLM, *sizes]).notes
    )
    others = prepare_config(PPOConfig, [*base, SGLANG, f"{ROLLOUT}.engine_kwargs.vllm.swap_space=4"])
    assert any("engine_kwargs.vllm: not read" in note for note in others.notes)
    blocks = [f"{ROLLOUT}.kv_cache=paged"]
    assert not any("kv_cache" in note for note in prepare_config(PPOConfig, [*base, *blocks]).notes)
    assert any(
        "has blocks of its own" in note for note in prepare_config(PPOConfig, [*base, VLLM, *blocks]).notes
    )
    assert any(
        "kv_cache: settings of the native engine" in note
        for note in prepare_config(PPOConfig, [*base, f"{ROLLOUT}.name=hf", *blocks]).notes
    )
    assert any(
        "dtype of the module" in note
        for note in prepare_config(PPOConfig, [*base, f"{ROLLOUT}.dtype=bfloat16"]).notes
    )
    rounded = prepare_config(PPOConfig, [*base, VLLM, f"{ROLLOUT}.quantization=fp8"])
    assert any("rounded weights" in note for note in rounded.notes)


def test_keys_and_values_may_be_kept_on_a_pool_of_its_own(base: list[str]) -> None:
    prepared = prepare_config(PPOConfig, [*base, TWO, *APART, KEPT])
    assert not prepared.config.actor_rollout_ref.rollout.recompute_kv_after_update
