"""The checks of the generation engine, as far as they follow from the keys alone: its own keys, features by
the table of engines, and quantized weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Set

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.checks.algorithm import uncorrected
from hybridflow.config.checks.paths import plugin_problem
from hybridflow.config.engine_features import ENGINES, KEY, NATIVE_KINDS, TABLE
from hybridflow.config.layout import (
    inexact_ranks,
    mix_pools,
    pool_sizes,
    processes_by_node,
    share_a_pool,
)
from hybridflow.config.needs import estimator_facts, may_use_agents, replayed_steps, uses_agents
from hybridflow.config.paths import local
from hybridflow.config.root import PPOConfig
from hybridflow.config.trainer import EXACT_SCHEDULES

ROLLOUT = "actor_rollout_ref.rollout"
SET_BY_US = {
    "vllm": (
        *("model", "seed", "tensor_parallel_size", "enable_expert_parallel", "logprobs_mode"),
        *("worker_extension_cls", "enable_sleep_mode", "enable_lora", "max_loras", "max_lora_rank"),
        "generation_config",
    ),
    "sglang": (
        *("model_path", "random_seed", "tp_size", "ep_size", "dp_size", "pp_size", "host", "port"),
        *("enable_memory_saver", "enable_weights_cpu_backup", "custom_weight_loader"),
        *("incremental_streaming_output", "sampling_backend", "sampling_defaults", "speculative_algorithm"),
    ),
}
"""Arguments of an engine that follow from keys of this schema, or on which hybridflow relies."""
WITH_WEIGHTS = ("vllm", "sglang")
"""Engines that hold their own weights."""


def rollout_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of where and how tokens are generated."""
    rollout = config.actor_rollout_ref.rollout
    if "" in rollout.stop:
        yield (
            f"{ROLLOUT}.stop={rollout.stop} holds an empty text, which would end every response: leave it out"
        )
    if rollout.exact is True and (reason := inexact_ranks(config)):
        yield f"{ROLLOUT}.exact=true cannot hold: {reason}, or leave {ROLLOUT}.exact out"
    if not rollout.recompute_kv_after_update and share_a_pool(config.trainer, "rollout", "actor"):
        yield (
            f"{ROLLOUT}.recompute_kv_after_update=false where rollout and actor share devices, whose memory "
            "training needs between two generations: set trainer.placement.rollout to a pool of its own, or "
            "recompute_kv_after_update=true"
        )
    if mix_pools(config.trainer, "rollout", "actor"):
        yield (
            f"trainer.placement={config.trainer.placement} has rollout and actor share some of their pools "
            "and not all: generation takes its weights either in place or by a push. Set "
            "trainer.placement.rollout to the actor's pools, or to others only"
        )


def context_notes(config: PPOConfig, given: Set[str]) -> Iterator[str]:
    """Yield one line for the context of an engine where nothing reads it."""
    engine = config.actor_rollout_ref.rollout.name
    path = f"{ROLLOUT}.max_model_len"
    if engine not in WITH_WEIGHTS and path in given and not may_use_agents(config):
        yield f"{path} is read only by vllm, sglang and agents: {ROLLOUT}.name={engine} reads none of it"


def server_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of an engine that holds its own weights."""
    rollout = config.actor_rollout_ref.rollout
    experts = rollout.expert_parallel_size
    allowed = {1, rollout.tensor_model_parallel_size} if rollout.name in WITH_WEIGHTS else {1}
    if experts not in allowed:
        yield (
            f"{ROLLOUT}.expert_parallel_size={experts} with {ROLLOUT}.name={rollout.name} and "
            f"tensor_model_parallel_size={rollout.tensor_model_parallel_size}: set it to "
            f"{' or '.join(map(str, sorted(allowed)))}"
        )
    if rollout.name not in WITH_WEIGHTS:
        return
    server = rollout.server
    processes = sum(pool_sizes(config.trainer, "rollout"))
    if server.enable is False and rollout.name == "vllm" and processes > 1:
        yield (
            f"{ROLLOUT}.server.enable=false with {processes} processes that generate: without servers vLLM "
            f"serves one process alone: leave {ROLLOUT}.server.enable out"
        )
    width = rollout.tensor_model_parallel_size
    addresses = [server.address] if isinstance(server.address, str) else server.address
    if addresses is not None and len(addresses) * width != processes:
        yield (
            f"{ROLLOUT}.server.address names {len(addresses)} servers, and {processes} processes generate, "
            f"{width} of them together (tensor_model_parallel_size): give one for each {width}, or set "
            "trainer.placement.rollout to a pool of as many"
        )
    whole = all(processes % width == 0 for processes in pool_sizes(config.trainer, "rollout"))
    nodes = processes_by_node(config.trainer, "rollout")
    if addresses is None and whole and any(count % width for count in nodes):
        yield (
            f"{ROLLOUT}.tensor_model_parallel_size={width} with {ROLLOUT}.name={rollout.name} and "
            f"{sorted(set(nodes))} processes on a node: the ranks of a replica are on one node, where its "
            f"engine is started. Set a divisor, or start servers yourself and give their addresses "
            f"({ROLLOUT}.server.address)"
        )
    given = getattr(rollout.engine_kwargs, rollout.name)
    for name in sorted(set(given) & set(SET_BY_US[rollout.name])):
        yield f"{ROLLOUT}.engine_kwargs.{rollout.name}.{name} is set by hybridflow itself: leave it out"
    yield from _lengths(config, rollout)


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
    if rollout.speculative.enable:
        yield "speculation", f"{ROLLOUT}.speculative.enable=true"
    if rollout.tensor_model_parallel_size > 1:
        yield "tensor_parallel", f"{ROLLOUT}.tensor_model_parallel_size={rollout.tensor_model_parallel_size}"
    if model.lora_rank:
        yield "lora", f"{MODEL}.lora_rank={model.lora_rank}"
    elif model.lora_adapter_path:
        yield "lora", f"{MODEL}.lora_adapter_path={model.lora_adapter_path}"
    if (processes := sum(pool_sizes(config.trainer, "actor"))) > 1:
        yield "sharded_training", f"an actor on {processes} processes"


def precision_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the native engine cannot round weights as the keys ask."""
    rollout = config.actor_rollout_ref.rollout
    kind = rollout.quantization
    if kind is None or rollout.name != "native":
        return
    key = f"{ROLLOUT}.quantization={kind}"
    if kind not in NATIVE_KINDS:
        yield f"{key} with {ROLLOUT}.name=native, which rounds to {', '.join(NATIVE_KINDS)}: set one of these"
    if kind == "float16" and config.trainer.device not in ("auto", "cpu"):
        yield f"{key} is for CPUs, and trainer.device={config.trainer.device}: set it to fp8 or int8"


def uncorrected_precision(config: PPOConfig) -> Iterator[str]:
    """Yield a line where a run trains on tokens of rounded weights and nothing corrects for them."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.quantization and rollout.name == "native" and not config.trainer.val_only:
        yield from uncorrected(
            config, f"{ROLLOUT}.quantization={rollout.quantization} samples tokens from rounded weights"
        )


ASYNC = "trainer.async"


def schedule_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each number that does not fit the schedule, and for each key that it cannot read."""
    schedule = config.trainer.schedule
    if schedule == "sync":
        return
    yield from _bounds(config)
    if schedule in EXACT_SCHEDULES and config.trainer.async_.run_ahead > 0:
        yield from _refill(config)


def _bounds(config: PPOConfig) -> Iterator[str]:
    """How far generation runs ahead, and the bound on staleness."""
    schedule = config.trainer.schedule
    ahead = config.trainer.async_.run_ahead
    bound = config.trainer.async_.max_staleness
    shown = f"{ASYNC}.run_ahead={ahead:g}"
    if schedule == "one_step_off" and ahead not in (0, 1):
        yield (
            f"{shown} with trainer.schedule=one_step_off, which is 1 step ahead: leave it out, or set "
            "trainer.schedule=exact_async for more steps, or fully_async for a part of a step"
        )
    elif not math.isfinite(ahead):
        yield f"{shown}: wanted a number of steps, for example 1"
    elif schedule in EXACT_SCHEDULES and ahead != int(ahead):
        yield (
            f"{shown} with trainer.schedule={schedule}, which generates whole batches: set a whole number, "
            "or trainer.schedule=fully_async"
        )
    if bound is None or not math.isfinite(ahead):
        return  # resolve fills max_staleness where run_ahead is a number of steps
    if schedule in EXACT_SCHEDULES and bound != math.ceil(ahead):
        yield (
            f"{ASYNC}.max_staleness={bound} with trainer.schedule={schedule}, where every token is {shown} "
            f"steps old once the run is under way: leave {ASYNC}.max_staleness out"
        )
    elif bound < ahead:
        yield (
            f"{ASYNC}.max_staleness={bound} is less than {shown}, the steps that generation runs ahead: set "
            f"it to {math.ceil(ahead)} or more, or lower run_ahead"
        )


def uncorrected_rows(config: PPOConfig) -> Iterator[str]:
    """A loss on stale tokens has to know the policy that sampled them."""
    bound = config.trainer.async_.max_staleness
    age = replayed_steps(config)
    if not bound and not age:
        return
    stale = f"trainer.schedule={config.trainer.schedule} trains tokens up to {bound} steps old"
    if age:
        stale = f"algorithm.pf_ppo.max_age={age} trains rows again that are up to {age} steps older"
    yield from uncorrected(config, stale)


def _refill(config: PPOConfig) -> Iterator[str]:
    """An exact schedule knows the prompts of a batch before any of them is generated."""
    groups = config.algorithm.filter_groups
    batch = config.data.train_batch_size
    if groups.enable and config.data.gen_batch_size not in (None, batch):
        yield (
            f"data.gen_batch_size={config.data.gen_batch_size} with "
            f"trainer.schedule={config.trainer.schedule}, which generates the {batch} prompts of a step and "
            "never replaces a group that dynamic sampling drops: leave it out, or set "
            "trainer.schedule=fully_async, which refills"
        )


def schedule_notes(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each key that has less effect than it seems to have."""
    schedule = config.trainer.schedule
    keys = config.trainer.async_
    if schedule == "sync":
        return
    if schedule in EXACT_SCHEDULES and keys.run_ahead and config.algorithm.filter_groups.enable:
        yield (
            f"algorithm.filter_groups.enable=true with trainer.schedule={schedule}: groups that are dropped "
            "are not replaced, so such a batch is smaller (max_num_gen_batches is not read); fully_async "
            "refills"
        )
    batch = config.data.train_batch_size
    if 0 < keys.run_ahead * batch < 1:
        yield (
            f"{ASYNC}.run_ahead={keys.run_ahead:g} of data.train_batch_size={batch} groups is less than one "
            f"group, so nothing is generated ahead: set it to {1 / batch:.3g} or more"
        )


def agent_notes(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each key of agents that is set and has no effect."""
    rollout = config.actor_rollout_ref.rollout
    keys = rollout.multi_turn
    agent = rollout.agent
    chosen = {
        f"{ROLLOUT}.agent.command": agent.command,
        f"{ROLLOUT}.agent.default_agent_loop": agent.default_agent_loop != "single_turn_agent",
        "data.environment": config.data.environment,
        f"{ROLLOUT}.multi_turn.enable": keys.enable,
    }
    asked = [key for key, value in chosen.items() if value]
    if len(asked) > 1:
        yield f"{asked[0]} says which agent plays rows without an agent_name; {', '.join(asked[1:])} do not"
    tools = keys.tool_config_path or keys.function_tool_path
    if tools and not keys.enable and not config.data.environment:
        yield (
            f"tools ({tools}) are used by rows whose agent_name is tool_agent; for all rows set "
            f"{ROLLOUT}.multi_turn.enable=true"
        )
    if keys.interaction_config_path and config.data.environment:
        yield f"{ROLLOUT}.multi_turn.interaction_config_path: not read by rows that data.environment plays"


def agent_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of the keys of agents."""
    rollout = config.actor_rollout_ref.rollout
    yield from plugin_problem("data.environment", config.data.environment)
    agent = rollout.agent
    others = agent.command or agent.default_agent_loop != "single_turn_agent"
    if config.data.environment and not others and config.reward.reward_model.enable:
        yield (
            f"reward.reward_model.enable=true with data.environment={config.data.environment}, which gives "
            "the rewards itself: the reward model would never be asked. Set reward.reward_model.enable=false "
            "or leave data.environment out"
        )
    yield from plugin_problem(f"{ROLLOUT}.agent.default_agent_loop", agent.default_agent_loop)
    files = {
        f"{ROLLOUT}.multi_turn.tool_config_path": rollout.multi_turn.tool_config_path,
        f"{ROLLOUT}.multi_turn.interaction_config_path": rollout.multi_turn.interaction_config_path,
        f"{ROLLOUT}.agent.agent_loop_config_path": agent.agent_loop_config_path,
    }
    for key, file in files.items():
        if file and not local(file).is_file():
            yield f"{key}: there is no file {file}"
    functions = rollout.multi_turn.function_tool_path
    if functions and functions.endswith(".py") and not local(functions).is_file():
        yield f"{ROLLOUT}.multi_turn.function_tool_path: there is no file {functions}"
    if uses_agents(config) and config.distillation.lmbda < 1:
        yield (
            f"distillation.lmbda={config.distillation.lmbda} takes the data's own answers of one turn, and "
            "agents have several: set distillation.lmbda=1"
        )
    estimator = estimator_facts(config)
    if uses_agents(config) and estimator is not None and estimator.demonstration_rows:
        yield (
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} learns from the data's own answers of "
            "one turn, and agents have several: choose another estimator, such as grpo"
        )
