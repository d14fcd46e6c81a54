"""The checks of a user's own functions and classes by their source, which is read and not run.

keys ──path.py:name──► define ──► a line for each name that is not there and each signature that does not fit

The same signatures are checked again where the code is loaded, for what its source does not settle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridflow.config.own_code import (
    CALLED_WITH,
    CALLED_WITH_LISTS,
    DEFAULT_NAMES,
    ESTIMATOR_FORM,
    LOSS_FORM,
    TERM_KEYS,
    TOOL_MARKS,
    agent_faults,
    call_fault,
    defined_as,
    environment_faults,
    estimator_fault,
    loss_fault,
    needed_arguments,
    reward_fault,
    tool_faults,
)
from hybridflow.config.reward import RewardConfig
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.source_code import Definition, define, marked_functions, shown

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
ROLLOUT = "actor_rollout_ref.rollout"
SAMPLER_METHODS = ("__iter__", "__len__", "set_epoch")


def own_algorithm_problems(
    config: PPOConfig, estimator: Definition | None = None, loss: Definition | None = None
) -> Iterator[str]:
    """Yield one line for each problem of a user's own estimator and policy loss.

    Those that are loaded are given; left out, both are read from their source.
    """
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    any_column = config.trainer.step_class is not None  # a step of one's own may add columns
    if ":" in algorithm.adv_estimator:
        found = estimator or define(algorithm.adv_estimator)
        fault = ""
        if found.signature is not None:
            fault = estimator_fault(found.signature, algorithm, any_column=any_column)
        yield from _said(ESTIMATOR, algorithm.adv_estimator, found, fault, ESTIMATOR_FORM)
        yield from _absent(config, f"{ESTIMATOR}={shown(algorithm.adv_estimator)}", found)
    if ":" in actor.policy_loss.loss_mode:
        found = loss or define(actor.policy_loss.loss_mode)
        fault = ""
        if found.signature is not None:
            fault = loss_fault(found.signature, actor, any_column=any_column)
        yield from _said(LOSS, actor.policy_loss.loss_mode, found, fault, LOSS_FORM)
        yield from _absent(config, f"{LOSS}={shown(actor.policy_loss.loss_mode)}", found)


def _absent(config: PPOConfig, whose: str, found: Definition) -> Iterator[str]:
    """Yield one line for each column that a function needs and that the run does not have, by its keys."""
    if found.signature is None or config.trainer.step_class is not None:
        return
    needed = needed_arguments(found.signature)
    if "values" in needed and not config.critic.enable:
        yield f"{whose} needs values, and the run has no critic: set critic.enable=true"
    if "reward_components" in needed and not config.algorithm.gdpo_reward_keys:
        yield (
            f"{whose} needs reward_components: set algorithm.gdpo_reward_keys to keys that the reward "
            "returns, for example [acc,format]"
        )


def own_code_problems(config: PPOConfig | SFTConfig) -> Iterator[str]:
    """Yield one line for each problem of a user's own code besides the maths, as far as its source tells."""
    task = config.data.task
    if task.name and ":" in task.name and not task.name.startswith(("reasoning_gym:", "environment:")):
        options = {"seed": task.seed, **task.options}
        yield from _called("data.task.name", task.name, "def task(seed, **options)", (), options)
    if isinstance(config, SFTConfig):
        return
    yield from _reward_problems(config.reward)
    yield from _agent_problems(config)
    data = config.data
    if data.custom_cls.path:
        form = "__init__(self, files, tokenizer, config)"
        dataset = _joined(data.custom_cls.path, data.custom_cls.name)
        yield from _called("data.custom_cls", dataset, form, ("files", "tokenizer", "config"))
    if data.sampler.class_path:
        sampler = _joined(data.sampler.class_path, data.sampler.class_name)
        yield from _called("data.sampler", sampler, "__init__(self, dataset, seed)", ("dataset", "seed"))
        found = define(sampler)
        lacks = [name for name in SAMPLER_METHODS if found.method(name).kind == "missing"]
        if lacks:
            yield (
                f"data.sampler: {sampler} has no {', '.join(lacks)}; a sampler has "
                f"{', '.join(SAMPLER_METHODS)}"
            )
    step = config.trainer.step_class
    if step:
        found = define(step)
        fault = ""
        if found.kind == "function" or found.is_whole:
            fault = "is none"
        yield from _said(
            "trainer.step_class", step, found, fault, "a subclass of hybridflow.trainer.ppo.step.PPOStep"
        )


def _reward_problems(reward: RewardConfig) -> Iterator[str]:
    custom = reward.custom_reward_function
    called_with = CALLED_WITH_LISTS if reward.manager == "batch" else CALLED_WITH
    if custom.path:
        key = "reward.custom_reward_function"
        yield from _scores(key, custom.path, custom.name, custom.reward_kwargs, called_with)
    elif ":" in reward.function or reward.function.endswith(".py"):
        yield from _scores("reward.function", reward.function, DEFAULT_NAMES[0], custom.reward_kwargs)
    for position, term in enumerate(reward.terms):
        name = term.get("name") if isinstance(term, dict) else None
        if isinstance(name, str) and (":" in name or name.endswith(".py")):
            options = {str(key): value for key, value in term.items() if key not in TERM_KEYS}
            yield from _scores(f"reward.terms[{position}]", name, DEFAULT_NAMES[0], options)
    if reward.manager and ":" in reward.manager:
        form = "__init__(self, reward_function)"
        yield from _called("reward.manager", reward.manager, form, ("reward_function",))


def _scores(
    key: str, path: str, name: str, options: Mapping[str, Any], called_with: Sequence[str] = CALLED_WITH
) -> Iterator[str]:
    """Yield one line where a reward function is not there, or cannot be called with what it reads."""
    spec = _joined(path, name)
    if spec == f"{path}:{DEFAULT_NAMES[0]}" and define(spec).kind == "missing":
        other = f"{path}:{DEFAULT_NAMES[1]}"
        if define(other).kind != "missing":
            spec = other
    found = define(spec)
    fault = ""
    if found.kind == "function" and found.signature is not None:
        fault = reward_fault(found.signature, options, called_with)
    yield from _said(key, spec, found, fault)


def _agent_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line for each problem of an environment, an agent, or functions that are tools."""
    rollout = config.actor_rollout_ref.rollout
    environment = config.data.environment
    if environment and ":" in environment:
        found = define(environment)
        yield from _said("data.environment", environment, found)
        if found.kind in ("function", "class"):
            for fault in environment_faults(shown(environment), found, config.data.environment_options):
                yield f"data.environment: {fault}"
    agent = rollout.agent.default_agent_loop
    if ":" in agent:
        key = f"{ROLLOUT}.agent.default_agent_loop"
        found = define(agent)
        yield from _said(key, agent, found)
        if found.kind in ("function", "class"):
            for fault in agent_faults(agent, found, rollout.agent.options):
                yield f"{key}: {fault}"
    functions = rollout.multi_turn.function_tool_path
    if functions:
        for name, tool in marked_functions(functions, TOOL_MARKS):
            where = f"{ROLLOUT}.multi_turn.function_tool_path: {functions}: tool {name}"
            yield from (f"{where}, {fault}" for fault in tool_faults(tool))


def _called(
    key: str, spec: str, form: str, arguments: Sequence[str], options: Mapping[str, Any] | None = None
) -> Iterator[str]:
    """Yield one line where a user's function or class is not there, or cannot be called so."""
    found = define(spec)
    fault = call_fault(found.signature, arguments, options)
    yield from _said(key, spec, found, fault, form)


def _said(key: str, spec: str, found: Definition, fault: str = "", wanted: str = "") -> Iterator[str]:
    """Yield what is wrong with a user's object: its source, its name, or its signature."""
    location, _, name = spec.rpartition(":")
    if found.kind == "broken":
        yield f"{key}: importing {location} failed: {found.says}"
    elif found.kind == "missing":
        yield f"{key}: {location} has no name {name!r}; it defines: {found.says}"
    elif fault:
        yield defined_as(f"{key}: {shown(spec)}", name, found.signature, fault, wanted)


def _joined(path: str, name: str | None) -> str:
    """Return path:name, where the path may carry the name."""
    _, colon, last = path.rpartition(":")
    if colon and "/" not in last and "\\" not in last:
        return path
    return f"{path}:{name}"
