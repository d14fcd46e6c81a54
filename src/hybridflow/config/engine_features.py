"""The features of each generation engine, in one table: docs/rollout/engines.md is made from it, and runs are
refused by it.

    ENGINES × FEATURES ──TABLE──► Cell: "yes" with the test that shows it, "unshown" with what was missing to
    show it, or "no" with the
                                  reason and the way out

No entry is a promise: `tests/unit/rollout/test_capabilities.py` looks up every test that is named here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KEY = "actor_rollout_ref.rollout.name"


@dataclass(frozen=True)
class Engine:
    """A generation engine, in one phrase."""

    what: str
    trains: bool
    """Whether a run can have it as `rollout.name`."""


@dataclass(frozen=True)
class Cell:
    """Whether an engine has a feature."""

    test: str | None
    """Test that shows the feature, FILE::NAME under tests/; None: the engine does not have it, or no test
    shows it.
    """
    note: str = ""
    """Conditions under which it holds, or the reason why not and the way out."""
    unshown: bool = False
    """True where the engine may have it and no test shows it: nothing is refused, and nothing is promised."""

    @property
    def has(self) -> bool:
        """Whether a run may ask for the feature."""
        return self.test is not None or self.unshown


def yes(test: str, note: str = "") -> Cell:
    """Return the cell of a feature that an engine has, and that this test shows."""
    return Cell(test, note)


def no(note: str) -> Cell:
    """Return the cell of a feature that an engine lacks; the note gives the reason and the way out."""
    return Cell(None, note)


def unshown(note: str) -> Cell:
    """Return the cell of a feature that an engine may have; the note says why no test shows it."""
    return Cell(None, note, unshown=True)


ENGINES: Mapping[str, Engine] = {
    "native": Engine("ours, on the module that trains", trains=True),
    "hf": Engine("transformers' `generate`: slow, plain, what the others are compared with", trains=True),
    "vllm": Engine("vLLM, in process or as servers, with weights that are pushed", trains=True),
    "sglang": Engine("SGLang, as servers, with weights that are pushed", trains=True),
    "openai": Engine(
        "any OpenAI-compatible endpoint, for evaluation, frozen teachers and judges", trains=False
    ),
}

FEATURES: Mapping[str, str] = {
    "greedy_parity": "greedy tokens are those of transformers' `generate`",
    "log_probs": "log-probs of the whole distribution at the temperature, as training computes them",
    "groups": "n responses to a prompt",
    "seeds": "a request's tokens depend on its own seed, not on its batch",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition penalty",
    "logit_bias": "logit bias",
    "min_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop tokens",
    "stop": "stop texts",
    "top_log_probs": "log-probs of the most probable tokens",
    "abort": "requests can be aborted",
    "abort_partials": "an aborted request's tokens so far come back",
    "bad_requests": "a request that cannot be served is an error for that request only",
    "dies": "when it fails mid-batch, finished rows are kept and the others name it",
    "weight_updates": "new weights by Hugging Face name, with their version",
    "dropped_push": "a push that lost a weight is detected in the same step",
    "shared_weights": "generates with the actor's own weights: no second copy on one rank",
    "sharded_training": "the actor's weights may be sharded over ranks",
    "tensor_parallel": "ranks that generate together (tensor_model_parallel_size)",
    "lora": "an actor with LoRA adapters",
    "quantization": "generates with quantised weights",
    "exact": "log-probs equal to training's, to the bit",
    "sleep": "sleep frees memory, and wake_up restores the output",
    "prefix_reuse": "prompts that begin alike are computed once",
    "cpu": "runs on a CPU",
    "any_architecture": "models that our attention refuses (Bloom, Falcon, Mamba)",
}

_SAMPLING = "conformance/test_sampling.py"
_ENDINGS = "conformance/test_endings.py"
_WEIGHTS = "conformance/test_weights.py"
_ERRORS = "conformance/test_errors.py"
_WORKERS = "unit/workers/test_rollout_worker.py"
_HF_WORKERS = "unit/workers/test_hf_rollout.py"
_HF = "unit/rollout/test_hf_engine.py"
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


def _column(**other: Cell) -> dict[str, Cell]:
    """Cells of one engine: those given, and for all other features the conformance suite's test."""
    return {name: other.get(name) or yes(SHOWN_BY[name]) for name in FEATURES}


_NOT_WEIGHTS = no("the endpoint's weights are its own: set rollout.name=native to train")
_STUBBED = (
    "SGLang's own Python engine with its kernel package stubbed: no CPU build of the kernels is published"
)

TABLE: Mapping[str, Mapping[str, Cell]] = {
    "native": _column(
        shared_weights=yes(f"{_WORKERS}::test_in_one_process_the_module_is_shared_and_nothing_moves"),
        sharded_training=yes(f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does"),
        tensor_parallel=yes(f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does"),
        lora=yes(f"{_WORKERS}::test_replicas_of_a_sharded_actor_generate_what_one_process_does"),
        quantization=no("it generates with the module that trains, in its dtype"),
        exact=yes(
            "unit/models/test_exact_mode.py::test_generation_and_training_agree_to_the_bit",
            "on CPU in float32",
        ),
        prefix_reuse=yes(
            "unit/rollout/test_native_session.py::test_prompts_share_the_keys_of_what_they_begin_with"
        ),
        cpu=yes(SHOWN_BY["greedy_parity"]),
        any_architecture=no("the layers must let their attention be chosen: set rollout.name=hf"),
    ),
    "hf": _column(
        shared_weights=yes(f"{_HF}::test_it_leaves_the_shared_module_as_it_was"),
        sharded_training=yes(f"{_HF_WORKERS}::test_it_generates_for_a_sharded_actor_what_one_process_does"),
        tensor_parallel=no("set rollout.tensor_model_parallel_size=1, or rollout.name=native"),
        lora=yes(f"{_HF_WORKERS}::test_it_generates_for_a_sharded_actor_what_one_process_does"),
        sleep=yes(
            f"{_HF}::test_weights_with_a_source_are_there_while_the_engine_is_awake",
            "keys and values go with each batch anyway",
        ),
        quantization=no("it generates with the module that trains, in its dtype"),
        exact=no("transformers' attention rounds differently from ours: set rollout.name=native"),
        prefix_reuse=no("every prompt is computed: set rollout.name=native"),
        cpu=yes(SHOWN_BY["greedy_parity"]),
        any_architecture=yes(
            f"{_HF}::test_models_that_our_attention_refuses",
            "to generate, from Python: training refuses them",
        ),
    ),
    "vllm": _column(
        dies=yes("with_vllm/test_vllm_engines.py::test_a_killed_server_is_named_and_finished_rows_are_kept"),
        shared_weights=no("it has weights of its own, which are pushed before each step"),
        sharded_training=unshown("whole tensors are pushed; shown for a replica of the native engine only"),
        tensor_parallel=unshown("vLLM's own; needs several GPUs"),
        lora=yes(
            "with_vllm/test_vllm_training.py::test_rollout_and_training_agree_in_each_step",
            "folded, or as adapters (lora_as_adapters)",
        ),
        quantization=yes(
            "with_vllm/test_vllm_quantized.py::test_each_push_is_quantised",
            "on a CPU fp8_per_channel in bfloat16; fp8 needs a GPU",
        ),
        exact=no("its kernels round differently from ours: set rollout.name=native"),
        sleep=unshown("needs a GPU: on a CPU vLLM cannot sleep, and nothing happens"),
        prefix_reuse=unshown("vLLM's own (rollout.enable_prefix_caching)"),
        cpu=yes(SHOWN_BY["greedy_parity"], "its CPU build"),
        any_architecture=no("it has its own list of models"),
    ),
    "sglang": _column(
        dies=yes(
            "with_sglang/test_sglang_engines.py::test_a_killed_server_is_named_and_finished_rows_are_kept"
        ),
        shared_weights=no("it has weights of its own, which are pushed before each step"),
        sharded_training=unshown("whole tensors are pushed; shown for a replica of the native engine only"),
        tensor_parallel=unshown("SGLang's own; needs several GPUs"),
        lora=unshown("adapters are pushed folded into their weights"),
        quantization=unshown("SGLang's own; needs a GPU"),
        exact=no("its kernels round differently from ours: set rollout.name=native"),
        sleep=unshown("needs CUDA's torch_memory_saver: on a CPU SGLang cannot sleep, and nothing happens"),
        prefix_reuse=unshown("SGLang's own (rollout.enable_prefix_caching)"),
        cpu=yes(SHOWN_BY["greedy_parity"], _STUBBED),
        any_architecture=no("it has its own list of models"),
    ),
    "openai": _column(
        log_probs=yes(
            SHOWN_BY["log_probs"],
            "of `hybridflow serve`; of vLLM's own server where nothing limits or shifts the draw",
        ),
        dies=yes(
            f"{_OPENAI}::test_what_may_pass_is_tried_again_and_what_not_is_told",
            "tried again until the deadline",
        ),
        abort_partials=no("closing the connection loses what the server had so far"),
        weight_updates=_NOT_WEIGHTS,
        dropped_push=_NOT_WEIGHTS,
        shared_weights=_NOT_WEIGHTS,
        sharded_training=_NOT_WEIGHTS,
        tensor_parallel=_NOT_WEIGHTS,
        lora=no("the endpoint's model decides"),
        quantization=no("the endpoint's model decides"),
        exact=_NOT_WEIGHTS,
        sleep=no("there is no memory of the endpoint here"),
        prefix_reuse=no("the endpoint decides"),
        cpu=no("the endpoint decides"),
        any_architecture=no("the endpoint decides"),
    ),
}
