"""The test that shows a feature of a generation engine, for every feature that the table says it has.

SHOWN_BY: the conformance suite's test, which every engine that has the feature runs
ELSEWHERE: an engine's own test in its place
"""

from __future__ import annotations

from collections.abc import Mapping

from hybridflow.config.engine_features import TABLE

_SAMPLING = "conformance/test_sampling.py"
_ENDINGS = "conformance/test_endings.py"
_WEIGHTS = "conformance/test_weights.py"
_ERRORS = "conformance/test_errors.py"
_WORKERS = "unit/workers/test_rollout_worker.py"
_HF = "unit/rollout/test_hf_engine.py"
_SESSION = "unit/rollout/test_native_session.py"
_DRAFTS = "unit/rollout/test_native_drafts.py"
_SGLANG = "with_sglang/test_sglang_engines.py"
_SGLANG_OF_TWO = "with_sglang/test_sglang_training.py::test_rollout_and_training_agree_in_each_step"
_VLLM_OF_TWO = "with_vllm/test_vllm_training.py::test_two_ranks_have_one_vllm_of_two_workers"
_OPENAI = "unit/rollout/test_openai_engine.py"

SHOWN_BY: Mapping[str, str] = {
    "greedy_parity": f"{_SAMPLING}::test_greedy_tokens_are_those_of_generate",
    "log_probs": f"{_SAMPLING}::test_log_probs_are_those_of_a_forward_pass_at_the_temperature",
    "groups": f"{_SAMPLING}::test_groups_are_whole_and_in_order",
    "seeds": f"{_SAMPLING}::test_same_seeds_same_tokens_in_any_company",
    "top_k": f"{_SAMPLING}::test_only_allowed_tokens_are_drawn",
    "top_p": f"{_SAMPLING}::test_only_allowed_tokens_are_drawn",
    "min_p": f"{_SAMPLING}::test_only_allowed_tokens_are_drawn",
    "repetition_penalty": f"{_SAMPLING}::test_repetition_penalty",
    "logit_bias": f"{_SAMPLING}::test_logit_bias",
    "top_log_probs": f"{_SAMPLING}::test_top_log_probs",
    "min_tokens": f"{_ENDINGS}::test_min_tokens_and_ignore_eos",
    "ignore_eos": f"{_ENDINGS}::test_min_tokens_and_ignore_eos",
    "stop_token_ids": f"{_ENDINGS}::test_stop_token_and_length",
    "stop": f"{_ENDINGS}::test_stop_text",
    "abort": f"{_ENDINGS}::test_abort",
    "abort_partials": f"{_ENDINGS}::test_abort_gives_what_there_is",
    "bad_requests": f"{_ERRORS}::test_a_bad_request_is_an_error_of_its_own",
    "dies": f"{_ERRORS}::test_an_engine_that_dies_is_named_and_finished_rows_are_kept",
    "weight_updates": f"{_WEIGHTS}::test_an_update_changes_the_output_and_carries_its_version",
    "dropped_push": f"{_WEIGHTS}::test_a_dropped_push_is_found",
    "sleep": f"{_WEIGHTS}::test_sleep_frees_memory_and_waking_up_restores_the_output",
}
"""The conformance suite's test of a feature, which every engine that has it runs."""

ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "native": {
        "shared_weights": f"{_WORKERS}::test_in_one_process_the_module_is_shared_and_nothing_moves",
        "sharded_training": f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does",
        "tensor_parallel": f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does",
        "lora": f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does",
        "routes": "unit/rollout/test_native_routes.py::test_routes_are_those_of_training_at_no_extra_pass",
        "quantization": "unit/workers/test_quantized_rollout.py::test_copies_of_the_actors_module_follow_it",
        "exact": "unit/models/test_exact_mode.py::test_generation_and_training_agree_to_the_bit",
        "prefix_reuse": f"{_SESSION}::test_prompts_share_the_keys_of_what_they_begin_with",
        "speculation": f"{_DRAFTS}::test_tokens_and_log_probs_are_those_without_drafts",
        "cpu": SHOWN_BY["greedy_parity"],
    },
    "hf": {
        "shared_weights": f"{_HF}::test_it_leaves_the_shared_module_as_it_was",
        "sharded_training": f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does",
        "lora": f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does",
        "sleep": f"{_HF}::test_weights_with_a_source_are_there_while_the_engine_is_awake",
        "cpu": SHOWN_BY["greedy_parity"],
        "any_architecture": f"{_HF}::test_models_that_our_attention_refuses",
    },
    "vllm": {
        "dies": "with_vllm/test_vllm_engines.py::test_a_killed_server_is_named_and_finished_rows_are_kept",
        "tensor_parallel": _VLLM_OF_TWO,
        "sharded_training": _VLLM_OF_TWO,
        "lora": "with_vllm/test_vllm_training.py::test_rollout_and_training_agree_in_each_step",
        "quantization": "with_vllm/test_vllm_quantized.py::test_each_push_is_quantised",
        "cpu": SHOWN_BY["greedy_parity"],
    },
    "sglang": {
        "tensor_parallel": _SGLANG_OF_TWO,
        "sharded_training": _SGLANG_OF_TWO,
        "dies": f"{_SGLANG}::test_a_killed_server_is_named_and_finished_rows_are_kept",
        "cpu": SHOWN_BY["greedy_parity"],
    },
    "openai": {
        "dies": f"{_OPENAI}::test_what_may_pass_is_tried_again_and_what_not_is_told",
    },
}


def shown_by(engine: str, feature: str) -> str | None:
    """The address of the test under tests/, FILE::NAME; None where the table promises nothing."""
    cell = TABLE[engine][feature]
    if not cell.has or cell.unshown:
        return None
    return ELSEWHERE.get(engine, {}).get(feature) or SHOWN_BY[feature]
