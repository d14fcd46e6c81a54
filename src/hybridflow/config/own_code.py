"""How a run calls a user's own code, and the error for a signature that cannot be called so.

signature ──*_fault──► "" or one sentence: what is wrong, what is likely meant, how it is written

A signature is that of a loaded function, or was read from the source (`source_code.py`): the same rules hold
before anything is imported and after. `own_code_problems` and `own_algorithm_problems` apply them to keys:

keys ──path.py:name──► define ──► a line for each name that is not there and each signature that does not fit
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter, Signature
from typing import Any

from hybridflow.algorithms.catalog import LOSS_ARGUMENTS, LOSS_INPUTS, takes_by_place
from hybridflow.config.actor_rollout_ref import ActorConfig
from hybridflow.config.algorithm import AlgorithmConfig
from hybridflow.config.reward import JUDGE_OFFERS, RewardConfig, has_judge
from hybridflow.config.root import PPOConfig, SFTConfig
from hybridflow.config.source_code import Definition, define, marked_functions, shown
from hybridflow.config.tree import argument_keys

ESTIMATOR = "algorithm.adv_estimator"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
ROLLOUT = "actor_rollout_ref.rollout"
SAMPLER_METHODS = ("__iter__", "__len__", "set_epoch")
COLUMNS = (
    *("prompts", "responses", "input_ids", "attention_mask", "response_mask", "loss_mask"),
    *("rollout_log_probs", "routed_experts", "policy_version", "call", "trajectory_id", "lineage"),
    *("trajectory_rows", "row_id", "rm_scores", "token_level_scores", "token_level_rewards"),
    *("reward_baselines", "reward_components", "process_rewards", "old_log_probs", "entropys"),
    *("sum_pi_squared", "teacher_log_probs", "ref_log_prob", "values", "advantages", "returns"),
    *("rollout_is_weights", "positive", "is_demonstration", "group_ids", "teacher_top_outcomes"),
    *("source_weight", "source_kl_coef"),
)
"""Columns of tensors that a batch may have: those of `protocol/fields.py` but for the preference losses'."""
CALLED_WITH = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Arguments of a reward function of one response; it names what it reads."""
CALLED_WITH_LISTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
TOKENS = "response_ids"
MESSAGES = "messages"
"""Arguments that a reward function gets where it names them: what was sampled, the whole conversation."""
ALSO_CALLED = {"response": "solution_str"}
"""Other names of a reward function's arguments."""
COMPLETIONS = "completions"
"""The argument of a reward function of lists, which names columns of the data beside it."""
COLUMNS_OF_ITS_OWN = ("prompts", COMPLETIONS, "completion_ids")
"""Arguments of a reward function of lists that are no columns of the data."""
DEFAULT_NAMES = ("compute_score", "compute_reward")
"""Names under which a file's reward function is looked for where none is given."""
TERM_KEYS = ("name", "weight", "key", "when")
"""Entries of a term of the reward that are no options of its function."""
TOOL_MARKS = ("tool", "function_tool")
"""Names of the decorator that makes a function a tool."""
ENVIRONMENT_METHODS = {
    "reset(self, row)": ("self", "row"),
    "step(self, text)": ("self", "text"),
    "score(self)": ("self",),
    "close(self)": ("self",),
}
"""How methods of an environment are written, and the arguments that they are called with."""
LOSS_FORM = (
    "def loss(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, *, …), "
    "where … are columns, keys such as clip_low, and entries of policy_loss.options; it may leave out any "
    "but log_prob, or take all six as inputs"
)
ESTIMATOR_FORM = (
    "def estimator(token_level_rewards, response_mask, group_ids, *, …), where each argument is a column, a "
    "key such as gamma, or an entry of algorithm.options"
)
_LIKELY = {
    "group_ids": ("uid", "uids", "index", "group", "groups", "group_id", "group_index"),
    "response_mask": ("mask", "masks", "eos_mask", "action_mask", "completion_mask"),
    "token_level_rewards": ("reward", "rewards", "token_rewards"),
    "token_level_scores": ("score", "scores"),
    "log_prob": ("log_probs", "logprob", "logprobs", "logp", "new_log_prob", "new_log_probs"),
    "old_log_prob": ("old_log_probs", "old_logprob", "old_logprobs", "old_logp"),
    "old_log_probs": ("old_log_prob", "old_logprob", "old_logprobs", "old_logp", "log_probs", "logprobs"),
    "advantages": ("advantage", "adv", "advs"),
    "ref_log_prob": ("ref_log_probs", "ref_logprob", "ref_logprobs", "ref_logp", "reference_log_probs"),
    "rollout_is_weights": ("weights", "is_weights", "importance_weights"),
    "values": ("value", "vpreds"),
    "entropys": ("entropy", "entropies"),
    "ground_truth": ("answer", "answers", "gold", "label", "labels", "target", "reference", "gt"),
    "solution_str": ("solution", "completion", "text", "output", "answer_text", "prediction"),
    "extra_info": ("info", "extra", "row", "metadata"),
}
"""Names that other libraries have for what is called so here."""


def loss_fault(signature: Signature, config: ActorConfig, *, any_column: bool = False) -> str:
    """Return what is wrong with the signature of a policy loss, or "". `any_column`: a batch may have others
    than `COLUMNS`.
    """
    options = config.policy_loss.options
    if takes_by_place(signature):
        return ""  # whatever it calls them
    # the driver makes reward_components for the estimator alone
    given = (LOSS_INPUTS, *LOSS_ARGUMENTS)
    available = {*given, *COLUMNS, *argument_keys(ActorConfig), *options} - {"reward_components"}
    faults = _argument_faults(signature, available, any_column)
    named = named_arguments(signature)
    if "log_prob" not in named and LOSS_INPUTS not in named and not takes_any_name(signature):
        faults.append("without log_prob its result has no gradient")
    faults += _option_faults(signature, options, "policy_loss.options", given)
    return "; ".join(faults)


def estimator_fault(signature: Signature, algorithm: AlgorithmConfig, *, any_column: bool = False) -> str:
    """Return what is wrong with the signature of an advantage estimator, or ""."""
    options = algorithm.options
    keys = {*argument_keys(AlgorithmConfig), *argument_keys(RewardConfig)}
    faults = _argument_faults(signature, {*COLUMNS, *keys, *options}, any_column)
    return "; ".join([*faults, *_option_faults(signature, options, "algorithm.options")])


def _argument_faults(signature: Signature, available: Collection[str], any_column: bool) -> list[str]:
    """Return what is wrong with the arguments of a function that gets by name what is available."""
    faults = []
    by_place = [name for name, each in signature.parameters.items() if each.kind is Parameter.POSITIONAL_ONLY]
    if by_place:
        faults.append(f"{', '.join(by_place)} cannot be given by name: leave out the /")
    unknown = [name for name in needed_arguments(signature) if name not in available]
    if unknown and not any_column:
        faults.append(f"there is no {' and no '.join(with_likely(name, available) for name in unknown)}")
    return faults


def _option_faults(
    signature: Signature, options: Mapping[str, Any], key: str, others: Collection[str] = ()
) -> list[str]:
    """Return what is wrong with options: one is no argument of the function, or is one of `others`."""
    taken = named_arguments(signature).keys() - {*others}
    strange = sorted(options.keys() - taken)
    if takes_any_name(signature):
        strange = sorted(options.keys() & {*others})
    if not strange:
        return []
    return [
        f"{key} has {', '.join(strange)}, which it does not take: its arguments are "
        f"{', '.join(sorted(taken)) or 'none'}"
    ]


def named_arguments(signature: Signature) -> dict[str, Parameter]:
    """Return the arguments that can be given by name."""
    kinds = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return {name: each for name, each in signature.parameters.items() if each.kind in kinds}


def needed_arguments(signature: Signature) -> list[str]:
    """Return the names of the arguments that have no default."""
    return [name for name, each in named_arguments(signature).items() if each.default is Parameter.empty]


def takes_any_name(signature: Signature) -> bool:
    """Return whether a function takes whatever it is given by name, as `**rest` does."""
    return any(each.kind is Parameter.VAR_KEYWORD for each in signature.parameters.values())


def with_likely(name: str, available: Collection[str]) -> str:
    """Return a name that does not exist with the one that is likely meant, where there is one."""
    meant = [ours for ours, theirs in _LIKELY.items() if name.lower() in theirs and ours in available]
    meant += difflib.get_close_matches(name, sorted(available), 1, 0.75)
    if not meant:
        return name
    return f"{name} (did you mean {meant[0]}?)"


def reward_names(signature: Signature, called_with: Sequence[str] = CALLED_WITH) -> dict[str, str]:
    """Return what a reward function is called with: the names of its parameters, and the argument of each.

    Of the arguments of one response it gets those that it names, and all of them if it takes any name or
    names none.
    """
    everything = {name: name for name in called_with}
    parameters = signature.parameters
    optional = {name: name for name in (TOKENS, MESSAGES) if name in parameters}
    others = {other: name for other, name in ALSO_CALLED.items() if other in parameters}
    named = {name: name for name in called_with if name in parameters}
    if takes_any_name(signature):
        named |= {name: name for name in called_with if name not in others.values()}
    if called_with != CALLED_WITH or not {**named, **others}:
        named = everything
    return {**named, **others, **optional}


def reward_fault(
    signature: Signature, options: Mapping[str, Any], called_with: Sequence[str] = CALLED_WITH
) -> str:
    """Return what is wrong with the signature of a reward function and its options, or ""."""
    if COMPLETIONS in signature.parameters:
        # what is wrong with the options of a reward function that names columns of the data
        if clash := [name for name in options if name in COLUMNS_OF_ITS_OWN]:
            return f"{', '.join(clash)} comes from the row; remove it from the options"
        try:
            signature.bind_partial(**options)
        except TypeError as error:
            return f"its options do not fit: {error}"
        return ""
    try:
        signature.bind(**{**options, **reward_names(signature, called_with)})
    except TypeError as error:
        words = ", ".join(f"{name}=" for name in (*called_with, *options))
        given = {*called_with, TOKENS, MESSAGES, *ALSO_CALLED}
        unknown = [name for name in needed_arguments(signature) if name not in {*given, *options}]
        meant = [text for name in unknown if (text := with_likely(name, given)) != name]
        reasons = "; ".join([str(error), *meant])
        return (
            f"it is called with {words} ({reasons}); name some of these, or {TOKENS}= or {MESSAGES}=, and no "
            "other parameter without a default"
        )
    if clash := [name for name in options if name in (*called_with, *ALSO_CALLED)]:
        return f"{', '.join(clash)} comes from the row; remove it from the options"
    return ""


def call_fault(
    signature: Signature | None, arguments: Sequence[str], options: Mapping[str, Any] | None = None
) -> str:
    """Return why a function cannot be called with that many arguments and these options, or "".

    None, a signature that is not known, takes anything.
    """
    try:
        if signature is not None:
            signature.bind(*arguments, **(options or {}))
    except TypeError as error:
        return str(error)
    return ""


def defined_as(whose: str, name: str, signature: Signature | None, fault: str, wanted: str = "") -> str:
    """Return the message about a signature with a fault; `wanted` shows how it is written."""
    if signature is not None:  # without types, which make it long
        plain = [each.replace(annotation=Parameter.empty) for each in signature.parameters.values()]
        signature = Signature(plain)
    got = f"{whose}: got {name}{signature}"
    if wanted:
        got += f", wanted {wanted}"
    return f"{got}: {fault}"


def environment_faults(
    name: str, found: Definition, options: Mapping[str, Any], options_key: str = "data.environment_options"
) -> Iterator[str]:
    """Yield what is wrong with a class of environments and the options that its objects are made with."""
    lacks = [method for method in ("reset", "step") if found.method(method).kind == "missing"]
    if found.kind != "class" or lacks:
        yield (
            f"{name} is no environment, wanted a class with the methods reset(row) and step(text), such as a "
            "subclass of hybridflow.environments.Environment"
        )
        return
    for wanted, arguments in ENVIRONMENT_METHODS.items():
        method = wanted.partition("(")[0]
        signature = found.method(method).signature
        if fault := call_fault(signature, arguments):
            called = f"{name.rpartition(':')[2]}.{method}"
            yield defined_as(name, called, signature, fault, f"def {wanted}")
    if fault := call_fault(found.signature, (), options):
        yield f"{options_key}={dict(options)} do not fit {name}{found.signature}: {fault}"


def agent_faults(name: str, found: Definition, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with an agent: a function, a class of agents, or one of agent loops."""
    called = name.rpartition(":")[2]
    if found.kind == "function":
        if fault := call_fault(found.signature, ("base_url", "row")):
            yield defined_as(name, called, found.signature, fault, "def run(base_url, row)")
        return
    form = "async def run(self, episode, policy)"
    run = found.method("run")
    fault = call_fault(run.signature, ("self", "episode", "policy"))
    if not found.is_whole:  # it may be a loop
        loop = call_fault(run.signature, ("self", "sampling_params"))
        form += ", or of a loop async def run(self, sampling_params, **kwargs)"
        fault = loop and fault
    elif run.kind == "missing" or (run.kind == "function" and not run.is_async):
        yield f"{name} is no class with `{form}`"
    elif wrong := call_fault(found.signature, ["tokenizer"], options):
        yield defined_as(name, called, found.signature, wrong, "__init__(self, tokenizer, …)")
    if fault:
        yield defined_as(name, f"{called}.run", run.signature, fault, form)


def generate_faults(
    whose: str, found: Definition, arguments: Sequence[str] = ("self", "dataset")
) -> Iterator[str]:
    """Yield what is wrong with the method of a class that makes rows; a method of an object has no self."""
    if found.kind == "missing":
        yield f"{whose} has no generate(self, dataset), which makes rows after each step"
    parameters = () if found.signature is None else found.signature.parameters
    batch = {name: None for name in ("batch",) if name in parameters}
    fault = call_fault(found.signature, arguments, batch)
    if found.is_async:
        fault = "it is async, and nothing awaits it"
    if fault:
        form = "def generate(self, dataset), or def generate(self, dataset, batch)"
        yield defined_as(whose, "generate", found.signature, fault, form)


def tool_faults(signature: Signature) -> Iterator[str]:
    """Yield what is wrong with a function that is a tool: its schema is made of its signature."""
    for name, argument in signature.parameters.items():
        if argument.kind not in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY):
            yield (f"argument {name!r}: got the form {argument}, wanted an argument with a name and a type")
        elif argument.annotation is Parameter.empty:
            yield f"argument {name!r}: it has no type; write, for example, {name}: str"


def own_algorithm_problems(
    config: PPOConfig, estimator: Definition | None = None, loss: Definition | None = None
) -> Iterator[str]:
    """Yield one line for each problem of a user's own estimator and policy loss.

    Those that are loaded are given; left out, both are read from their source.
    """
    algorithm = config.algorithm
    actor = config.actor_rollout_ref.actor
    any_column = config.trainer.step_class is not None  # a user's step may add columns
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
    """Yield one line for each problem of a user's own code besides the maths, as far as its source shows."""
    task = config.data.task
    if task.name and ":" in task.name and not task.name.startswith(("reasoning_gym:", "environment:")):
        options = {"seed": task.seed, **task.options}
        yield from _called("data.task.name", task.name, "def task(seed, **options)", (), options)
    if isinstance(config, SFTConfig):
        return
    yield from _reward_problems(config.reward)
    yield from _agent_problems(config)
    data = config.data
    dataset = _joined(data.custom_cls.path, data.custom_cls.name)
    if dataset:
        form = "__init__(self, files, tokenizer, config)"
        yield from _called("data.custom_cls", dataset, form, ("files", "tokenizer", "config"))
    sampler = _joined(data.sampler.class_path, data.sampler.class_name)
    if sampler:
        yield from _called("data.sampler", sampler, "__init__(self, dataset, seed)", ("dataset", "seed"))
        found = define(sampler)
        lacks = [name for name in SAMPLER_METHODS if found.method(name).kind == "missing"]
        if lacks:
            yield (
                f"data.sampler: {sampler} has no {', '.join(lacks)}; a sampler has "
                f"{', '.join(SAMPLER_METHODS)}"
            )
    datagen = _joined(data.datagen.path, data.datagen.name)
    if datagen:
        yield from _called("data.datagen", datagen, "__init__(self, config)", ("config",))
        yield from generate_faults(f"data.datagen: {datagen}", define(datagen).method("generate"))
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
    scores = partial(_scores, offers=JUDGE_OFFERS if has_judge(reward) else ())
    called_with = CALLED_WITH_LISTS if reward.manager == "batch" else CALLED_WITH
    if custom.path:
        key = "reward.custom_reward_function"
        yield from scores(key, custom.path, custom.name, custom.reward_kwargs, called_with)
    elif ":" in reward.function or reward.function.endswith(".py"):
        yield from scores("reward.function", reward.function, DEFAULT_NAMES[0], custom.reward_kwargs)
    for position, term in enumerate(reward.terms):
        name = term.get("name") if isinstance(term, dict) else None
        if isinstance(name, str) and (":" in name or name.endswith(".py")):
            options = {str(key): value for key, value in term.items() if key not in TERM_KEYS}
            yield from scores(f"reward.terms[{position}]", name, DEFAULT_NAMES[0], options)
    if reward.manager and ":" in reward.manager:
        form = "__init__(self, reward_function)"
        yield from _called("reward.manager", reward.manager, form, ("reward_function",))


def _scores(
    key: str,
    path: str,
    name: str,
    options: Mapping[str, Any],
    called_with: Sequence[str] = CALLED_WITH,
    *,
    offers: Sequence[str],
) -> Iterator[str]:
    """Yield one line where a reward function is not there, or cannot be called with what it reads; those of
    `offers` that it names are given to it.
    """
    spec = _joined(path, name)
    if spec == f"{path}:{DEFAULT_NAMES[0]}" and define(spec).kind == "missing":
        other = f"{path}:{DEFAULT_NAMES[1]}"
        if define(other).kind != "missing":
            spec = other
    found = define(spec)
    fault = ""
    if found.kind == "function" and found.signature is not None:
        offered = {each: None for each in offers if each in found.signature.parameters}
        fault = reward_fault(found.signature, {**offered, **options}, called_with)
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


def _joined(path: str | None, name: str | None) -> str:
    """Return path:name, where the path may carry the name; "" where one of the two is not given."""
    if not path:
        return ""
    _, colon, last = path.rpartition(":")
    if colon and "/" not in last and "\\" not in last:
        return path
    return f"{path}:{name}" if name else ""
