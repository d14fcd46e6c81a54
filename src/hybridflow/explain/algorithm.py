"""The formulas of a run in the order of its step, each with the numbers of the configuration.

    PPOConfig ──explain_algorithm──► Section(title, lines, formulas) for each part of the step

Neither a model nor data is needed. A formula is what opens the docstring of its function, which the catalog
reads. The keys say which argument they set, and how equations write it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from hybridflow.algorithms.catalog import AGGREGATIONS, KL_ESTIMATORS, RESAMPLING, described
from hybridflow.config import PPOConfig
from hybridflow.config.explain import CONVERSATION, TURNS, explain
from hybridflow.config.needs import (
    estimator_facts,
    has_divergence,
    longest_row,
    loss_facts,
    needs_reference,
    needs_teacher,
    replayed_steps,
    rows_per_prompt,
    tells_top_outcomes,
    uses_agents,
)
from hybridflow.config.thresholds import parse_rejection
from hybridflow.explain.formula import (
    ACTOR,
    PRM,
    ROLLOUT,
    ExplainedRun,
    Formula,
    Number,
    formula_of,
    own_formula,
    shown,
)
from hybridflow.trainer.ppo.columns import find_estimator
from hybridflow.workers.losses import find_policy_loss


@dataclass(frozen=True)
class Section:
    """One part of the step: words, then formulas."""

    title: str
    lines: tuple[str, ...] = ()
    formulas: tuple[Formula, ...] = ()


def explain_algorithm(config: PPOConfig) -> list[Section]:
    """Return the parts of a step of this run, in their order; `config` comes from `prepare_config`.

    Raises ConfigError where a user's own estimator or loss cannot be loaded.
    """
    run = ExplainedRun(config)
    parts = (
        _rewards,
        _groups,
        _correction,
        _advantage,
        _resampling,
        _policy,
        _aggregation,
        _further,
        _value,
        _steps,
    )
    return [section for part in parts if (section := part(run)) is not None]


def _rewards(run: ExplainedRun) -> Section:
    lines = [
        f"scores s by {_scorer(run)}",
        "token rewards r_t: the score on the last sampled token, 0 before it",
    ]
    formulas = []
    buffer = "reward.reward_kwargs.overlong_buffer_cfg"
    if run[f"{buffer}.enable"]:
        numbers = (
            run.number("max_len", "reward.reward_kwargs.max_resp_len"),
            run.number("buffer_len", f"{buffer}.len"),
            run.number("factor", f"{buffer}.penalty_factor"),
        )
        formulas.append(_known("overlong shaping", "episodes.filters:overlong_penalty", *numbers))
    if run["algorithm.use_kl_in_reward"]:
        formulas += _kl_in_reward(run)
    else:
        lines.append("no KL in the reward (algorithm.use_kl_in_reward=false)")
    if run[f"{PRM}.enable"]:
        beta = run.number("beta", f"{PRM}.beta", "β")
        granularity = run.number("granularity", f"{PRM}.granularity")
        module = "algorithms.process_reward"
        formulas.append(_known("process rewards", f"{module}:implicit_rewards", beta, granularity))
        formulas.append(_known("loss of the process reward model", f"{module}:process_reward_loss", beta))
        lines.append(f"the process reward model: {run.says(f'{PRM}.update')}")
    return Section("rewards", tuple(lines), tuple(formulas))


def _known(name: str, function: str, *numbers: Number, notes: tuple[str, ...] = ()) -> Formula:
    """Return the formula of the function "module:name" of the package."""
    return formula_of(described(f"hybridflow.{function}"), numbers, name=name, notes=notes)


def _scorer(run: ExplainedRun) -> str:
    """Return what scores the responses of this run."""
    own = run["reward.custom_reward_function.path"]
    terms = run["reward.terms"]
    if own:
        return f"{own}:{run['reward.custom_reward_function.name']}"
    if terms:
        return "reward.terms: " + " + ".join(f"{term.get('weight', 1)}·{term.get('name')}" for term in terms)
    return f"reward.function={run['reward.function']}"


def _kl_in_reward(run: ExplainedRun) -> list[Formula]:
    formulas = [
        _known(
            "KL in the reward",
            "trainer.ppo.columns:apply_kl_penalty",
            run.number("beta", "algorithm.kl_ctrl.kl_coef"),
        ),
        _kl_estimator(run, "algorithm.kl_penalty"),
    ]
    if run["algorithm.kl_ctrl.type"] == "adaptive":
        target = run.number("target", "algorithm.kl_ctrl.target_kl")
        horizon = run.number("horizon", "algorithm.kl_ctrl.horizon")
        count = run["data.train_batch_size"] * run[f"{ROLLOUT}.n"]
        rows = Number("rows", count, f"data.train_batch_size × {ROLLOUT}.n")
        formulas.append(
            _known("its coefficient", "algorithms.kl:AdaptiveKLController", target, horizon, rows)
        )
    return formulas


def _kl_estimator(run: ExplainedRun, key: str) -> Formula:
    kind = run[key]
    if kind == "full":
        return _known("exact KL over the vocabulary", "models.heads.divergence:full_kl", run.number("", key))
    notes: tuple[str, ...] = ()
    if kind.endswith("+"):
        notes = ("its gradient is that of k2: ½(x − y)²",)
    return formula_of(
        described("hybridflow.algorithms.kl:kl_estimate"),
        [run.number("", key)],
        name=f"KL estimator {kind}",
        equation=f"kl = {KL_ESTIMATORS[kind.removesuffix('+')]}, x = logπ, y = logπ_ref",
        notes=notes,
    )


def _groups(run: ExplainedRun) -> Section:
    lines = []
    formulas = []
    path = "algorithm.filter_groups"
    if run[f"{path}.enable"]:
        names = ("metric", "min_mean", "max_mean", "max_num_gen_batches")
        keys = [*(f"{path}.{name}" for name in names), "data.gen_batch_size", "data.train_batch_size"]
        numbers = (run.number("", key) for key in keys)
        formulas.append(_known("dynamic sampling", "episodes.filters:groups_to_keep", *numbers))
    else:
        lines.append(
            f"every group: {run['data.train_batch_size']} prompts × {run[f'{ROLLOUT}.n']} responses (no "
            "dynamic sampling)"
        )
    if run["algorithm.overlong_filtering"]:
        longest = run.number("", "data.max_response_length")
        formulas.append(_known("overlong filtering", "episodes.filters:filter_overlong", longest))
    return Section("which rows are learned from", tuple(lines), tuple(formulas))


def _correction(run: ExplainedRun) -> Section:
    path = "algorithm.rollout_correction"
    module = "algorithms.rollout_correction"
    lines = []
    formulas = []
    if run[f"{path}.bypass_mode"]:
        lines.append(f"logπ_old is what the rollout engine reported: {run.says(f'{path}.bypass_mode')}")
        lines.append(run.says(f"{path}.loss_type"))
    if run[f"{path}.rollout_is"]:
        numbers = (
            run.number("level", f"{path}.rollout_is"),
            run.number("threshold", f"{path}.rollout_is_threshold"),
            run.number("batch_normalize", f"{path}.rollout_is_batch_normalize"),
        )
        formulas.append(_known("importance weights", f"{module}:rollout_weights", *numbers))
    if run[f"{path}.rollout_rs"]:
        options = run.number("options", f"{path}.rollout_rs")
        thresholds = run.number("thresholds", f"{path}.rollout_rs_threshold")
        rules = parse_rejection(options.value, thresholds.value)
        kept = tuple(
            f"kept: {each.low:.4g} ≤ {each.over} {each.statistic} ≤ {each.high:.4g}".replace("-inf ≤ ", "")
            for each in rules
        )
        formulas.append(_known("rejection", f"{module}:rejection", options, thresholds, notes=kept))
    if not formulas:
        lines.append(
            "nothing is weighted or rejected; the difference of rollout and training is measured "
            "(rollout_corr/*)"
        )
    return Section("rollout correction", tuple(lines), tuple(formulas))


def _advantage(run: ExplainedRun) -> Section:
    name = run["algorithm.adv_estimator"]
    function = find_estimator(run.config.algorithm).function
    facts = estimator_facts(run.config)
    more = []
    if "group_ids" in inspect.signature(inspect.unwrap(function)).parameters:
        more.append(run.number("n", f"{ROLLOUT}.n"))
    if facts is None:
        formula = own_formula(function, [*run.own_arguments(function, "algorithm.options"), *more])
    else:
        numbers = [*run.arguments(facts.reads, "algorithm.options"), *more]
        formula = formula_of(facts.described, numbers)
    lines = []
    if needs_teacher(run.config):
        teacher = run["distillation.teacher_model.path"] or "not set yet"
        lines.append(f"the teacher: distillation.teacher_model.path={teacher}")
    for source, entry in run["algorithm.by_source"].items():
        told = ", ".join(f"{key}={shown(value)}" for key, value in entry.items())
        lines.append(f"rows of the data source {source} are learned from apart: {told}")
    return Section(f"the advantage: algorithm.adv_estimator={name}", tuple(lines), (formula,))


def _resampling(run: ExplainedRun) -> Section | None:
    if not run["algorithm.use_pf_ppo"]:
        return None
    method = run.number("method", "algorithm.pf_ppo.reweight_method")
    numbers = (method, run.number("weight_pow", "algorithm.pf_ppo.weight_pow", "p"))
    function = described("hybridflow.algorithms.resampling:resample_rows")
    equation = f"{function.formula}; {RESAMPLING[method.value]}"
    formula = formula_of(function, numbers, name="PF-PPO", equation=equation)
    lines: tuple[str, ...] = ()
    if age := replayed_steps(run.config):
        lines = (f"from the rows of this step and of the last {age}: algorithm.pf_ppo.max_age={age}",)
    return Section("resampling of rows", lines, (formula,))


def _policy(run: ExplainedRun) -> Section:
    name = run[f"{ACTOR}.policy_loss.loss_mode"]
    loss = find_policy_loss(run.config.actor_rollout_ref.actor)
    facts = loss_facts(run.config)
    options = f"{ACTOR}.policy_loss.options"
    if facts is None:
        formulas = [own_formula(loss.function, run.own_arguments(loss.function, options))]
    else:
        function = facts.described
        own = [name for name in function.arguments if name in facts.reads]
        formulas = [formula_of(function, run.arguments(own, options))]
        if facts.select:
            chosen = run.arguments(facts.selects)
            formulas.append(formula_of(described(facts.path(facts.select)), chosen))
        if facts.pairs:
            formulas.append(_pair_loss(run))
    lines = []
    if loss.keeps_groups:
        lines.append("the rows of a prompt stay together in a micro-batch")
    return Section(f"the policy loss: {ACTOR}.policy_loss.loss_mode={name}", tuple(lines), tuple(formulas))


def _pair_loss(run: ExplainedRun) -> Formula:
    kind = run[f"{ACTOR}.policy_loss.dpo_loss"]
    numbers = [run.number("beta", f"{ACTOR}.policy_loss.dpo_beta", "β")]
    if kind == "sigmoid":
        numbers.append(run.number("label_smoothing", f"{ACTOR}.policy_loss.dpo_label_smoothing", "ε"))
    function = "algorithms.preference:dpo" if kind == "sigmoid" else "algorithms.preference:ipo"
    return _known(f"of a pair, in force by dpo_loss={kind}", function, *numbers)


def _aggregation(run: ExplainedRun) -> Section:
    mode = run[f"{ACTOR}.loss_agg_mode"] or find_policy_loss(run.config.actor_rollout_ref.actor).agg_mode
    return Section(
        f"from token losses to one number: {mode}",
        (),
        (_aggregate(run, mode, f"{ACTOR}.ppo_mini_batch_size"),),
    )


def _aggregate(run: ExplainedRun, mode: str, mini_key: str) -> Formula:
    mini = run[mini_key]
    n = rows_per_prompt(run.config)
    longest = run["data.max_response_length"]
    one = "responses"
    if uses_agents(run.config):
        longest = longest_row(run.config)[0]
        one = "whole conversations"
    equation = AGGREGATIONS[mode]
    numbers = []
    if "num_tokens" in equation:
        most = f"at most {mini * n * longest:,} = {mini} prompts × {n} {one} × {longest} tokens"
        meaning = "tokens of loss_mask in the whole mini-batch, counted again for each"
        numbers.append(Number("num_tokens", most, mini_key, meaning=meaning))
    if "num_sequences" in equation:
        meaning = f"{mini} prompts × {n} responses; less rows with nothing to learn from"
        numbers.append(Number("num_sequences", mini * n, mini_key, meaning=meaning))
    if "scale_factor" in equation:
        numbers.append(run.number("scale_factor", f"{ACTOR}.loss_scale_factor"))
    function = described("hybridflow.algorithms.aggregation:aggregate")
    return formula_of(function, numbers, name=mode, equation=f"loss = {equation}")


def _further(run: ExplainedRun) -> Section:
    lines = []
    formulas = []
    if run[f"{ACTOR}.entropy_coeff"]:
        lines.append(
            f"− {shown(run[f'{ACTOR}.entropy_coeff'])} · entropy of the policy, aggregated alike "
            f"({ACTOR}.entropy_coeff)"
        )
    if run[f"{ACTOR}.use_kl_loss"]:
        lines.append(f"+ {shown(run[f'{ACTOR}.kl_loss_coef'])} · kl, aggregated alike ({ACTOR}.kl_loss_coef)")
        formulas.append(_kl_estimator(run, f"{ACTOR}.kl_loss_type"))
    if has_divergence(run.config):
        path = "distillation.distillation_loss"
        place = "beside the policy loss" if run[f"{path}.use_task_rewards"] else "in place of the policy loss"
        weight = shown(run[f"{path}.distillation_loss_coef"])
        lines.append(
            f"+ {weight} · divergence from the teacher, aggregated alike, {place} "
            f"({path}.distillation_loss_coef, use_task_rewards)"
        )
        names = ["loss_mode", "jsd_beta"] + ["topk", "tail"] * tells_top_outcomes(run.config)
        numbers = (run.number("", f"{path}.{name}") for name in names)
        formulas.append(_known("divergence", "algorithms.divergence:divergence", *numbers))
    if run[f"{ACTOR}.positive_lm_loss_coef"]:
        lines.append(
            f"+ {shown(run[f'{ACTOR}.positive_lm_loss_coef'])} · loss of right responses "
            f"({ACTOR}.positive_lm_loss_coef)"
        )
        function = "algorithms.positive_examples:positive_example_loss"
        formulas.append(_known("likelihood of right responses", function))
    if needs_reference(run.config):
        lines.append(run.says("algorithm.ref_update_freq"))
    return Section("further terms of the loss", tuple(lines or ["none"]), tuple(formulas))


def _value(run: ExplainedRun) -> Section | None:
    if not run["critic.enable"]:
        return None
    clip = run.number("clip_range", "critic.cliprange_value")
    aggregation = _aggregate(run, run["critic.loss_agg_mode"], "critic.ppo_mini_batch_size")
    lines = []
    if run["trainer.critic_warmup"]:
        lines.append(run.says("trainer.critic_warmup"))
    value = _known("value_loss", "algorithms.value_loss:value_loss", clip)
    return Section("the value loss", tuple(lines), (value, aggregation))


def _steps(run: ExplainedRun) -> Section:
    wanted = ("sequences per step", TURNS, CONVERSATION, "mini-batches per step", "optimizer steps per step")
    lines = [
        f"{line.label}: {line.value} ({line.how})" for line in explain(run.config) if line.label in wanted
    ]
    return Section(
        "steps of a batch", (*lines, run.says(f"{ACTOR}.grad_clip"), run.says(f"{ACTOR}.optim.lr"))
    )
