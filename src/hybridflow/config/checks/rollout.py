"""The checks of the engine that generates, as far as the keys alone can tell: its own keys, features by the
table of engines, and rounded weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from urllib.parse import urlsplit

from hybridflow.config.actor_rollout_ref import RolloutConfig, RolloutTraceConfig
from hybridflow.config.checks.correction import uncorrected
from hybridflow.config.engine_features import ENGINES, KEY, NATIVE_KINDS, TABLE
from hybridflow.config.layout import mix_pools, pool_sizes, share_a_pool
from hybridflow.config.needs import is_given, may_use_agents
from hybridflow.config.root import PPOConfig

ROLLOUT = "actor_rollout_ref.rollout"
VLLM_KEYS = (
    "max_model_len",
    "enable_chunked_prefill",
    "free_cache_engine",
    "load_format",
    "lora_as_adapters",
    "update_weights_bucket_megabytes",
    "engine_kwargs",
    "server",
)
"""Keys that the native engine and the hf engine do not read."""
NATIVE_KEYS = (
    "enable_prefix_caching",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "enable_torch_compile",
    "kv_cache",
)
"""Keys of the native engine that the hf engine does not read."""
SET_BY_US = {
    "vllm": (
        *("model", "seed", "tensor_parallel_size", "generation_config", "logprobs_mode"),
        *("worker_extension_cls", "enable_sleep_mode", "enable_lora", "max_loras", "max_lora_rank"),
    ),
    "sglang": (
        *("model_path", "random_seed", "tp_size", "dp_size", "pp_size", "host", "port"),
        *("enable_memory_saver", "enable_weights_cpu_backup", "custom_weight_loader"),
        *("incremental_streaming_output", "sampling_backend", "sampling_defaults", "speculative_algorithm"),
    ),
}
"""Arguments of an engine that follow from keys of this schema, or on which hybridflow relies."""
WITH_WEIGHTS = ("vllm", "sglang")
"""Engines that have weights of their own."""


def rollout_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of the engine that `rollout.name` chooses."""
    rollout = config.actor_rollout_ref.rollout
    sizes = rollout.cudagraph_capture_sizes
    if sizes is not None and (not sizes or min(sizes) < 1):
        yield (
            f"{ROLLOUT}.cudagraph_capture_sizes={sizes}: wanted numbers of rows, at least 1 each; for no "
            f"graphs set {ROLLOUT}.enforce_eager=true"
        )
    if rollout.enable_torch_compile and rollout.exact is True:
        yield (
            f"{ROLLOUT}.enable_torch_compile=true with {ROLLOUT}.exact=true: fused operations round "
            f"otherwise than training does; set {ROLLOUT}.exact=auto, or enable_torch_compile=false"
        )
    if rollout.trace.endpoint is not None:
        yield from _endpoint(rollout.trace)
    if not rollout.recompute_kv_after_update:
        yield from _kept_keys_and_values(config, rollout)
    if rollout.skip.enable and config.trainer.schedule != "sync":
        yield (
            f"{ROLLOUT}.skip.enable=true with trainer.schedule={config.trainer.schedule}: only the "
            "synchronous schedule reads dumped rollouts; set trainer.schedule=sync, or skip.enable=false"
        )
    if rollout.skip.enable and rollout.exact is True:
        yield (
            f"{ROLLOUT}.skip.enable=true with {ROLLOUT}.exact=true: dumped log-probs are those of other "
            f"weights than the actor's; set {ROLLOUT}.exact=auto"
        )
    if mix_pools(config.trainer, "rollout", "actor"):
        yield (
            f"trainer.placement={config.trainer.placement} has rollout and actor share some of their pools "
            "and not all: generation takes its weights either in place or by a push. Set "
            "trainer.placement.rollout to the actor's pools, or to others only"
        )
    if rollout.name in WITH_WEIGHTS:
        yield from _with_weights(config, rollout)
    elif rollout.dtype not in ("auto", "bfloat16"):
        yield (
            f"{ROLLOUT}.dtype={rollout.dtype} with {ROLLOUT}.name={rollout.name}, which generates in the "
            "dtype of the module that trains: set actor_rollout_ref.model.dtype"
        )


def _endpoint(trace: RolloutTraceConfig) -> Iterator[str]:
    """Yield what is wrong with the address that takes traces."""
    if urlsplit(trace.endpoint or "").scheme not in ("http", "https"):
        yield (
            f"{ROLLOUT}.trace.endpoint={trace.endpoint} is no address: wanted http://HOST:4318/v1/traces or "
            "https://…"
        )
    if trace.backend not in (None, "otel"):
        yield (
            f"{ROLLOUT}.trace.endpoint is read with backend=otel, and it is {trace.backend}, which has its "
            "address in variables of its own: leave endpoint out, or set backend=otel"
        )


def _kept_keys_and_values(config: PPOConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Engines that cannot go on with the keys and values of older weights."""
    key = f"{ROLLOUT}.recompute_kv_after_update=false"
    if rollout.name != "native":
        yield (
            f"{key} with {ROLLOUT}.name={rollout.name}, which takes new weights while nothing runs: set "
            f"{ROLLOUT}.name=native, or recompute_kv_after_update=true"
        )
    if share_a_pool(config.trainer, "rollout", "actor"):
        yield (
            f"{key} where rollout and actor share devices, whose memory training needs between two "
            "generations: set trainer.placement.rollout to a pool of its own, or "
            "recompute_kv_after_update=true"
        )


def rollout_notes(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for each key that is set and that the engine does not read."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name not in WITH_WEIGHTS:
        odd = [f"{ROLLOUT}.{name}" for name in VLLM_KEYS if is_given(f"{ROLLOUT}.{name}", given)]
        if may_use_agents(config):
            odd = [key for key in odd if key != f"{ROLLOUT}.max_model_len"]
        if odd:
            yield (
                f"{', '.join(odd)}: settings of a separate engine, which {ROLLOUT}.name={rollout.name} does "
                "not read"
            )
        if rollout.dtype == "bfloat16":
            yield (
                f"{ROLLOUT}.dtype=bfloat16: read by vllm and sglang; {ROLLOUT}.name={rollout.name} "
                "generates in the dtype of the module that trains (actor_rollout_ref.model.dtype)"
            )
    if rollout.name == "hf":
        odd = [f"{ROLLOUT}.{name}" for name in NATIVE_KEYS if is_given(f"{ROLLOUT}.{name}", given)]
        if odd:
            yield f"{', '.join(odd)}: settings of the native engine, which {ROLLOUT}.name=hf does not read"
    other = {"vllm": "sglang", "sglang": "vllm"}.get(rollout.name)
    if other is not None and getattr(rollout.engine_kwargs, other):
        yield (
            f"{ROLLOUT}.engine_kwargs.{other}: not read with {ROLLOUT}.name={rollout.name}, which has "
            f"engine_kwargs.{rollout.name}"
        )
    if rollout.name in WITH_WEIGHTS and rollout.cudagraph_capture_sizes is not None:
        instead = "vllm.compilation_config" if rollout.name == "vllm" else "sglang.cuda_graph_bs_decode"
        yield (
            f"{ROLLOUT}.cudagraph_capture_sizes: read by the native engine; with "
            f"{ROLLOUT}.name={rollout.name} set {ROLLOUT}.engine_kwargs.{instead}"
        )
    if rollout.name in WITH_WEIGHTS and rollout.kv_cache != "auto":
        yield (
            f"{ROLLOUT}.kv_cache={rollout.kv_cache}: read by the native engine; "
            f"{ROLLOUT}.name={rollout.name} has blocks of its own"
        )
    if rollout.name in WITH_WEIGHTS and rollout.enable_torch_compile:
        yield (
            f"{ROLLOUT}.enable_torch_compile=true: read by the native engine; {ROLLOUT}.name={rollout.name} "
            f"takes its own setting under {ROLLOUT}.engine_kwargs"
        )
    if rollout.name in WITH_WEIGHTS and rollout.quantization:
        yield (
            f"{ROLLOUT}.quantization={rollout.quantization}: tokens come from rounded weights; consider "
            "algorithm.rollout_correction"
        )


def _with_weights(config: PPOConfig, rollout: RolloutConfig) -> Iterator[str]:
    yield from _servers(config, rollout)
    yield from _lengths(config, rollout)
    yield from _adapters(config, rollout)
    given = getattr(rollout.engine_kwargs, rollout.name)
    for name in sorted(set(given) & set(SET_BY_US[rollout.name])):
        yield f"{ROLLOUT}.engine_kwargs.{rollout.name}.{name} is set by hybridflow itself: leave it out"


def _servers(config: PPOConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Servers that are switched off, that are too few, or that have no usable address."""
    server = rollout.server
    processes = sum(pool_sizes(config.trainer, "rollout"))
    if server.enable is False:
        yield from _server_off(rollout, processes)
    addresses = server.address or []
    if isinstance(addresses, str):
        addresses = [addresses]
    if server.address is not None and len(addresses) != processes:
        yield (
            f"{ROLLOUT}.server.address names {len(addresses)} servers, and {processes} processes generate: "
            "give one for each, or set trainer.placement.rollout to a pool of as many"
        )
    for address in addresses:
        if not address.startswith("http://"):
            yield f"{ROLLOUT}.server.address={address}: wanted http://HOST:PORT"
    if rollout.tensor_model_parallel_size > 1 and processes > 1:
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} with "
            f"{ROLLOUT}.name={rollout.name} and {processes} processes that generate: each has one device, "
            "and starts an engine on it. Set it to 1, or start larger servers yourself and give their "
            f"addresses ({ROLLOUT}.server.address)"
        )


def _server_off(rollout: RolloutConfig, processes: int) -> Iterator[str]:
    server = rollout.server
    off = f"{ROLLOUT}.server.enable=false"
    if server.address is not None:
        yield f"{off} with {ROLLOUT}.server.address={server.address}: leave one of them out"
    if server.python is not None:
        yield (
            f"{off} with {ROLLOUT}.server.python={server.python}, the python of a server: leave one of them "
            "out"
        )
    if rollout.name == "sglang":
        yield f"{off} with {ROLLOUT}.name=sglang, which is always a server: leave {ROLLOUT}.server.enable out"
    elif processes > 1:
        yield (
            f"{off} with {processes} processes that generate: without servers vLLM serves one process "
            f"alone: leave {ROLLOUT}.server.enable out"
        )


def _lengths(config: PPOConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Rows that are longer than the engine's limits."""
    data = config.data
    row = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < row:
        yield (
            f"{ROLLOUT}.max_model_len={rollout.max_model_len} cannot hold "
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {row} tokens: set it to {row} or more, "
            "or leave it out"
        )
    longest = rollout.max_model_len or row
    whole_prompts = rollout.name == "vllm" and not rollout.enable_chunked_prefill
    if whole_prompts and rollout.max_num_batched_tokens < longest:
        yield (
            f"{ROLLOUT}.max_num_batched_tokens={rollout.max_num_batched_tokens} is less than "
            f"{ROLLOUT}.max_model_len={longest}, and {ROLLOUT}.enable_chunked_prefill=false: set it to "
            f"{longest} or more, or enable_chunked_prefill=true"
        )


def _adapters(config: PPOConfig, rollout: RolloutConfig) -> Iterator[str]:
    """Adapters that are to be sent by themselves and cannot be."""
    model = config.actor_rollout_ref.model
    if not rollout.lora_as_adapters:
        return
    if rollout.name != "vllm":
        yield (
            f"{ROLLOUT}.lora_as_adapters=true with {ROLLOUT}.name={rollout.name}, which takes adapters "
            "folded into the weights: leave it out"
        )
    elif not (model.lora_rank or model.lora_adapter_path):
        yield (
            f"{ROLLOUT}.lora_as_adapters=true, and the actor has no adapters: set "
            "actor_rollout_ref.model.lora_rank, or leave it out"
        )


MODEL = "actor_rollout_ref.model"


def engine_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each feature that the keys ask for and that `rollout.name` does not have."""
    column = TABLE[config.actor_rollout_ref.rollout.name]
    for feature, asked in asked_features(config):
        if not column[feature].has:
            able = [name for name, engine in ENGINES.items() if engine.trains and TABLE[name][feature].has]
            others = ""
            if able:
                others = f" (engines that can: {', '.join(able)})"
            name = config.actor_rollout_ref.rollout.name
            yield f"{asked} with {KEY}={name}, which cannot do it: {column[feature].note}{others}"


def asked_features(config: PPOConfig) -> Iterator[tuple[str, str]]:
    """Yield (feature, the key and value that ask for it)."""
    rollout = config.actor_rollout_ref.rollout
    model = config.actor_rollout_ref.model
    for block, sampling in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if sampling.do_sample and sampling.top_k > 0:
            yield "top_k", f"{block}.top_k={sampling.top_k}"
        if sampling.do_sample and sampling.top_p < 1:
            yield "top_p", f"{block}.top_p={sampling.top_p}"
        if sampling.do_sample and sampling.min_p > 0:
            yield "min_p", f"{block}.min_p={sampling.min_p}"
        if sampling.repetition_penalty != 1:
            yield "repetition_penalty", f"{block}.repetition_penalty={sampling.repetition_penalty}"
    for name in ("stop", "stop_token_ids", "quantization"):
        if value := getattr(rollout, name):
            yield name, f"{ROLLOUT}.{name}={value}"
    for name in ("ignore_eos", "exact"):
        if getattr(rollout, name) is True:
            yield name, f"{ROLLOUT}.{name}=true"
    if rollout.enable_rollout_routing_replay:
        yield "routes", f"{ROLLOUT}.enable_rollout_routing_replay=true"
    if rollout.tensor_model_parallel_size > 1:
        yield "tensor_parallel", f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}"
    if model.lora_rank:
        yield "lora", f"{MODEL}.lora_rank={model.lora_rank}"
    elif model.lora_adapter_path:
        yield "lora", f"{MODEL}.lora_adapter_path={model.lora_adapter_path}"
    if (processes := sum(pool_sizes(config.trainer, "actor"))) > 1:
        yield "sharded_training", f"an actor on {processes} processes"


def precision_problems(config: PPOConfig, *, trains: bool = True) -> Iterator[str]:
    """Yield one line for each value that rounded weights do not go with and, if the run `trains`, for a
    missing correction.
    """
    rollout = config.actor_rollout_ref.rollout
    kind = rollout.quantization
    if kind is None or rollout.name != "native":
        return
    key = f"{ROLLOUT}.quantization={kind}"
    if kind not in NATIVE_KINDS:
        yield f"{key} with {ROLLOUT}.name=native, which rounds to {', '.join(NATIVE_KINDS)}: set one of these"
    if kind == "float16" and config.trainer.device not in ("auto", "cpu"):
        yield f"{key} is for CPUs, and trainer.device={config.trainer.device}: set it to fp8 or int8"
    if rollout.exact is True:
        yield (
            f"{key} with {ROLLOUT}.exact=true: rounded weights give other log-probs than training's; set "
            f"{ROLLOUT}.exact=auto, or {ROLLOUT}.quantization=null"
        )
    if rollout.enable_torch_compile:
        yield (
            f"{key} with {ROLLOUT}.enable_torch_compile=true: compiled steps know whole weights only; leave "
            "one of them out"
        )
    if trains and not config.trainer.val_only:
        yield from uncorrected(config, f"{key} samples tokens from rounded weights")
