"""The features of each generation engine, by which docs/rollout/engines.md is made and runs are refused.

    ENGINES × FEATURES ──TABLE──► Cell: "yes", "unshown" with what was missing, or "no" with the way out

No entry is a promise: `tests/conformance/shown_by.py` names the test that shows each "yes".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KEY = "actor_rollout_ref.rollout.name"
NATIVE_KINDS = ("int8", "fp8", "float16")
"""Kinds that the native engine rounds to: those of `models/copies/quantized_weights.py`."""


@dataclass(frozen=True)
class Engine:
    """A generation engine, in one phrase."""

    what: str
    trains: bool
    """Whether a run can have it as `rollout.name`."""


@dataclass(frozen=True)
class Cell:
    """Whether an engine has a feature."""

    has: bool
    """Whether a run may ask for the feature."""
    note: str = ""
    """Conditions under which it holds, or the reason why not and the way out."""
    unshown: bool = False
    """True where the engine may have it and no test shows it: nothing is refused, and nothing is promised."""


def yes(note: str = "") -> Cell:
    """Return the cell of a feature that an engine has, as a test shows; the note gives its conditions."""
    return Cell(True, note)


def no(note: str) -> Cell:
    """Return the cell of a feature that an engine lacks; the note gives the reason and the way out."""
    return Cell(False, note)


def unshown(note: str) -> Cell:
    """Return the cell of a feature that an engine may have; the note says why no test shows it."""
    return Cell(True, note, unshown=True)


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
    "routes": "the experts that each token went to (router replay R3)",
    "exact": "log-probs equal to training's, to the bit",
    "sleep": "sleep frees memory, and wake_up restores the output",
    "prefix_reuse": "prompts that begin alike are computed once",
    "speculation": "drafts are verified in one pass, and tokens are those without (speculative.enable)",
    "cpu": "runs on a CPU",
    "any_architecture": "models that our attention refuses (Bloom, Falcon, Mamba)",
}


def _column(**other: Cell) -> dict[str, Cell]:
    """Cells of one engine: those given, and a plain yes for all other features."""
    return {name: other.get(name, yes()) for name in FEATURES}


_NOT_WEIGHTS = no("the endpoint's weights are its own: set rollout.name=native to train")
_OTHER_DRAWS = "its own speculation draws in another way: set rollout.name=native"
_STUBBED = (
    "SGLang's own Python engine with its kernel package stubbed: no CPU build of the kernels is published"
)

TABLE: Mapping[str, Mapping[str, Cell]] = {
    "native": _column(
        quantization=yes("int8, fp8 and float16, from copies that it rounds itself"),
        routes=yes("of mixtures of experts, at no extra pass"),
        exact=yes("on CPU in float32"),
        any_architecture=no("the layers must let their attention be chosen: set rollout.name=hf"),
    ),
    "hf": _column(
        tensor_parallel=no("set rollout.tensor_model_parallel_size=1, or rollout.name=native"),
        quantization=no("it generates with the module that trains, in its dtype"),
        routes=no(
            "transformers' generate tells no routes: set rollout.name=native, or router_replay.mode=R2"
        ),
        exact=no("transformers' attention rounds differently from ours: set rollout.name=native"),
        sleep=yes("keys and values go with each batch anyway"),
        prefix_reuse=no("every prompt is computed: set rollout.name=native"),
        speculation=no("every token is a step of its own: set rollout.name=native"),
        any_architecture=yes("to generate, from Python: training refuses them"),
    ),
    "vllm": _column(
        shared_weights=no("it has weights of its own, which are pushed before each step"),
        sharded_training=yes("whole tensors are pushed"),
        tensor_parallel=yes("vLLM's own, over the replica's devices; shown by its CPU build"),
        lora=yes("folded, or as adapters (lora_as_adapters)"),
        quantization=yes("on a CPU fp8_per_channel in bfloat16; fp8 needs a GPU"),
        routes=no(
            "its routes are not read in this version: set rollout.name=native, or router_replay.mode=R2"
        ),
        exact=no("its kernels round differently from ours: set rollout.name=native"),
        sleep=unshown("needs a GPU: on a CPU vLLM cannot sleep, and nothing happens"),
        prefix_reuse=unshown("vLLM's own (rollout.enable_prefix_caching)"),
        speculation=no(_OTHER_DRAWS),
        cpu=yes("its CPU build"),
        any_architecture=no("it has its own list of models"),
    ),
    "sglang": _column(
        shared_weights=no("it has weights of its own, which are pushed before each step"),
        sharded_training=yes("whole tensors are pushed"),
        tensor_parallel=yes("SGLang's own, over the replica's devices; shown by its Python engine"),
        lora=unshown("adapters are pushed folded into their weights"),
        quantization=unshown("SGLang's own; needs a GPU"),
        routes=no(
            "its routes are not read in this version: set rollout.name=native, or router_replay.mode=R2"
        ),
        exact=no("its kernels round differently from ours: set rollout.name=native"),
        sleep=unshown("needs CUDA's torch_memory_saver: on a CPU SGLang cannot sleep, and nothing happens"),
        prefix_reuse=unshown("SGLang's own (rollout.enable_prefix_caching)"),
        speculation=no(_OTHER_DRAWS),
        cpu=yes(_STUBBED),
        any_architecture=no("it has its own list of models"),
    ),
    "openai": _column(
        log_probs=yes("of `hybridflow serve`; of vLLM's own server where nothing limits or shifts the draw"),
        abort_partials=no("closing the connection loses what the server had so far"),
        dies=yes("tried again until the deadline"),
        weight_updates=_NOT_WEIGHTS,
        dropped_push=_NOT_WEIGHTS,
        shared_weights=_NOT_WEIGHTS,
        sharded_training=_NOT_WEIGHTS,
        tensor_parallel=_NOT_WEIGHTS,
        lora=no("the endpoint's model decides"),
        quantization=no("the endpoint's model decides"),
        routes=no("an endpoint tells no routes"),
        exact=_NOT_WEIGHTS,
        sleep=no("there is no memory of the endpoint here"),
        prefix_reuse=no("the endpoint decides"),
        speculation=no("the endpoint decides"),
        cpu=no("the endpoint decides"),
        any_architecture=no("the endpoint decides"),
    ),
}
