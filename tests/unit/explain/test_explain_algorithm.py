"""The formulas of a run: the docstring's equation with the numbers of the configuration, in the order of the
step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridflow.algorithms.advantages import ADVANTAGE_ESTIMATORS, gae, grpo
from hybridflow.algorithms.aggregation import aggregate
from hybridflow.algorithms.kl import kl_estimate
from hybridflow.algorithms.policy_losses import POLICY_LOSSES
from hybridflow.config import PPOConfig
from hybridflow.config.recipes import recipe_names
from hybridflow.config.tree import keys_of
from hybridflow.errors import ConfigError
from hybridflow.explain.algorithm import PARAMETERS, Run, Section, explain_algorithm, look
from hybridflow.explain.formula import (
    Number,
    alternative,
    formula_of,
    in_force,
    place,
    put_in,
    shown,
    sources,
)
from hybridflow.workers.losses import loss_parameters

ACTOR = "actor_rollout_ref.actor"
GROUP = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8")
# what some need beside their name
BESIDE_ESTIMATOR = {
    "gdpo": ["algorithm.gdpo_reward_keys=[acc,format]"],
    "sppo": [f"{ACTOR}.policy_loss.loss_mode=sppo"],
    "online_dpo": [f"{ACTOR}.policy_loss.loss_mode=dpo"],
    "spin": [f"{ACTOR}.policy_loss.loss_mode=dpo"],
}
BESIDE_LOSS = {"sppo": "sppo", "dpo": "online_dpo"}


def sections(*overrides: str) -> dict[str, Section]:
    found = explain_algorithm(look(overrides).config)
    return {section.title.partition(":")[0]: section for section in found}


def with_numbers(section: Section, index: int = 0) -> str:
    return section.formulas[index].with_numbers


@pytest.mark.parametrize(
    ("equation", "values", "wanted"),
    [
        ("δ + γλ·L_next", {"γ": 1.0, "λ": 0.95}, "δ + 1.0·0.95·L_next"),
        ("γV_next − V", {"γ": 0.99}, "0.99·V_next − V"),
        ("½β(x − y)²", {"β": 0.1}, "½·0.1·(x − y)²"),
        ("clip(ρ, 1 − ε_low, 1 + ε_high)", {"ε_low": 0.2, "ε_high": 0.28}, "clip(ρ, 1 − 0.2, 1 + 0.28)"),
        ("at most −A·clip_c; my_clip_c stays", {"clip_c": 3.0, "c": 9.0}, "at most −A·3.0; my_clip_c stays"),
        ("λ = 1 − 1/(α·len), then λL", {"λ": 0.9, "α": 0.05}, "λ = 1 − 1/(0.05·len), then 0.9·L"),
        ("x − shift·y", {"shift": -0.5}, "x − (−0.5)·y"),
        ("A without `gamma`, λ_t", {"gamma": 0.9, "λ": 0.5}, "A without `gamma`, λ_t"),
        ("c if on, w·r, off·x", {"on": True, "w": [1, 2], "off": None}, "c if on, w·r, off·x"),
        ("β == γ", {"β": 1, "γ": 2}, "1 == 2"),
        ("s − softmean_β + β_1", {"β": 1.0}, "s − softmean_β + β_1"),
        ("n/(n − 1)·q̄_j − n̄", {"n": 8, "q": 2}, "8/(8 − 1)·q̄_j − n̄"),
    ],
)
def test_numbers_stand_where_the_symbols_stood(equation: str, values: dict[str, object], wanted: str) -> None:
    assert put_in(equation, values) == wanted


def test_a_switch_leaves_one_of_two_equations() -> None:
    text = "A = (s − μ)/σ on every token, or s − μ without `norm`; s = Σ r"
    assert in_force(text, {"norm": True}) == "A = (s − μ)/σ on every token; s = Σ r"
    assert in_force(text, {"norm": False}) == "A = s − μ on every token; s = Σ r"
    assert in_force(text, {}) == text


def test_an_alternative_of_a_docstring_is_found_by_any_of_its_names() -> None:
    assert alternative(aggregate, "token-mean") == "Σ/num_tokens"
    assert alternative(aggregate, "seq-mean-token-sum-norm") == "Σ_i Σ_t/(num_sequences·scale_factor)"
    assert alternative(kl_estimate, "k1") == alternative(kl_estimate, "kl") == "x − y"
    assert alternative(kl_estimate, "low_var_kl").startswith("e^d − d − 1 with d = clamp(y − x, ±20)")
    assert alternative(aggregate, "median") == ""


def test_sources_and_places_come_from_the_function() -> None:
    assert sources(grpo) == ("https://arxiv.org/abs/2402.03300", "https://arxiv.org/abs/2503.20783")
    file, _, line = place(grpo).rpartition(":")
    assert Path(file).read_text().splitlines()[int(line) - 1].startswith("def grpo(")
    assert place(len) == "(no source)"


def test_a_function_without_a_docstring_says_so() -> None:
    def bare(x: int) -> int:
        return x

    assert formula_of(bare, [Number(("x",), 1, "key")]).equation == "(no docstring)"
    assert formula_of(bare, own=True).signature == "bare(x)"


def test_values_are_shown_as_a_user_types_them() -> None:
    assert [shown(v) for v in (None, True, False, 0.0002, 8, -0.5, [1.0, 2], "token")] == [
        *("null", "true", "false", "0.0002", "8", "−0.5", "[1.0, 2]", "token")
    ]


def test_grpo_with_clip_higher() -> None:
    parts = sections(*GROUP, f"{ACTOR}.clip_ratio_high=0.28")
    assert list(parts) == [
        *("rewards", "which rows are learned from", "rollout correction", "the advantage", "the policy loss"),
        *("from token losses to one number", "further terms of the loss", "steps of a batch"),
    ]
    advantage, loss = parts["the advantage"].formulas[0], parts["the policy loss"].formulas[0]
    assert (
        advantage.equation.startswith("A = (s − μ_g)/(σ_g + 1e-6)")
        and "norm_by_std" not in advantage.with_numbers
    )
    assert {number.symbols[0]: number.value for number in advantage.numbers} == {"norm_by_std": True, "n": 8}
    assert "clip(ρ, 1 − 0.2, 1 + 0.28)" in loss.with_numbers and "−A·3.0" in loss.with_numbers
    assert [number.key for number in loss.numbers] == [
        f"{ACTOR}.clip_ratio",
        f"{ACTOR}.clip_ratio_high",
        f"{ACTOR}.clip_ratio_c",
    ]


def test_dr_grpo_shows_the_equation_without_the_division_and_its_divisor() -> None:
    parts = sections(
        *GROUP,
        "algorithm.norm_adv_by_std_in_grpo=false",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        "data.max_response_length=100",
    )
    assert with_numbers(parts["the advantage"]).startswith("A = s − μ_g on every token of a row; s =")
    assert with_numbers(parts["from token losses to one number"]) == "loss = Σ_i Σ_t/(2048·100.0)", (
        "256 prompts × 8 responses"
    )


def test_gae_with_the_options_of_vapo() -> None:
    plain = sections("algorithm.lam=0.95", "algorithm.gamma=0.99")["the advantage"]
    assert "0.99·0.95·L_next" in with_numbers(plain) and not plain.formulas[0].notes
    vapo = sections("algorithm.lam_length_alpha=0.05", "algorithm.lam_critic=1.0")["the advantage"].formulas[
        0
    ]
    assert "1.0·λ·L_next" in vapo.with_numbers, "λ follows the length, so no number stands for it"
    assert "1 − 1/(α·len)" in vapo.notes[0]
    assert {n.key: n.value for n in vapo.numbers}["algorithm.lam_length_alpha"] == 0.05


@pytest.mark.parametrize(
    ("kind", "wanted"), [("sigmoid", "h = 0.2·(Δ_chosen − Δ_rejected)"), ("ipo", "1/(2·0.2)")]
)
def test_a_loss_of_pairs_shows_the_one_in_force(kind: str, wanted: str) -> None:
    words = [f"{ACTOR}.policy_loss.{name}" for name in ("loss_mode=dpo", f"dpo_loss={kind}", "dpo_beta=0.2")]
    loss = sections("algorithm.adv_estimator=online_dpo", "actor_rollout_ref.rollout.n=8", *words)[
        "the policy loss"
    ]
    assert wanted in with_numbers(loss, 1) and loss.lines == (
        "the rows of a prompt stay together in a micro-batch",
    )


def test_a_number_is_labelled_by_the_symbols_that_stand_in_the_equation() -> None:
    words = [f"{ACTOR}.policy_loss.loss_mode=dppo_tv", *GROUP]
    (formula,) = sections(*words)["the policy loss"].formulas
    assert {formula.label(number): number.value for number in formula.numbers} == {
        "δ_low = clip_low": 0.2,
        "δ_high = clip_high": 0.2,
        "c = clip_c": 20.0,
    }
    assert formula.label(Number((), 1, "a.block.key")) == "key"


def test_every_term_that_is_on_is_told() -> None:
    parts = sections(
        *(
            "algorithm.use_kl_in_reward=true",
            "algorithm.kl_ctrl.type=adaptive",
            "algorithm.kl_ctrl.kl_coef=0.2",
        ),
        *(
            "algorithm.use_pf_ppo=true",
            "algorithm.filter_groups.enable=true",
            "actor_rollout_ref.rollout.n=8",
        ),
        *(
            f"{ACTOR}.entropy_coeff=0.01",
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_type=k3+",
            f"{ACTOR}.positive_lm_loss_coef=0.1",
        ),
        *(
            "algorithm.rollout_correction.rollout_is=token",
            "algorithm.rollout_correction.rollout_rs=token_k1",
        ),
        *("algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0'", "algorithm.overlong_filtering=true"),
        *(
            "reward.reward_kwargs.overlong_buffer_cfg.enable=true",
            "reward.reward_kwargs.overlong_buffer_cfg.len=128",
        ),
    )
    rewards = {formula.name: formula for formula in parts["rewards"].formulas}
    assert rewards["KL in the reward"].with_numbers == "token_level_rewards = scores - 0.2 * kl"
    assert (
        "kl/0.1 − 1" in rewards["its coefficient"].with_numbers
        and "8192/10000" in rewards["its coefficient"].with_numbers
    )
    assert "(512 − 128)" in rewards["overlong shaping"].with_numbers
    assert [formula.name for formula in parts["which rows are learned from"].formulas] == [
        "dynamic sampling",
        "overlong filtering",
    ]
    assert [formula.name for formula in parts["rollout correction"].formulas] == [
        "importance weights",
        "rejection",
    ]
    assert "|s|^2.0" in with_numbers(parts["resampling of rows"]) and "max_min" not in with_numbers(
        parts["resampling of rows"]
    )
    further = parts["further terms of the loss"]
    assert further.lines[0].startswith("− 0.01 · entropy") and further.lines[1].startswith("+ 0.001 · kl")
    assert further.lines[2].startswith("+ 0.1 · ") and further.formulas[0].notes == (
        "its gradient is that of k2: ½(x − y)²",
    )
    assert "V ± 0.5" in with_numbers(parts["the value loss"])
    assert (
        "optimizer steps per step: 4 (4 mini-batches × actor.ppo_epochs=1)" in parts["steps of a batch"].lines
    )


def test_rollout_log_probs_as_old_ones_and_terms_of_the_reward_are_told() -> None:
    parts = sections(
        *GROUP,
        "algorithm.rollout_correction.bypass_mode=true",
        "reward.terms=[{name: gsm8k, weight: 1}, {name: length, weight: -0.1}]",
    )
    lines = parts["rollout correction"].lines
    assert any("bypass_mode=true" in line for line in lines) and lines[-1].endswith(
        "is measured (rollout_corr/*)"
    )
    assert sections(*GROUP)["rollout correction"].lines[-1].endswith("is measured (rollout_corr/*)")
    assert parts["rewards"].lines[0] == "scores s by reward.terms: 1·gsm8k + -0.1·length"


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_is_explained(name: str) -> None:
    words = [
        f"algorithm.adv_estimator={name}",
        "actor_rollout_ref.rollout.n=8",
        *BESIDE_ESTIMATOR.get(name, []),
    ]
    formula = sections(*words)["the advantage"].formulas[0]
    assert "=" in formula.equation and formula.sources, (
        "the first paragraph holds the equation, the module names the paper"
    )
    assert formula.place.rpartition(":")[2].isdigit() and not formula.signature


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_is_explained_with_the_numbers_of_the_run(name: str) -> None:
    words = [f"{ACTOR}.policy_loss.loss_mode={name}", "actor_rollout_ref.rollout.n=8"]
    words.append(f"algorithm.adv_estimator={BESIDE_LOSS.get(name, 'grpo')}")
    config = look(words).config
    parts = {section.title.partition(":")[0]: section for section in explain_algorithm(config)}
    formulas = parts["the policy loss"].formulas
    assert formulas[0].sources and formulas[0].equation != "(no docstring)"
    handed_over = loss_parameters(config.actor_rollout_ref.actor)
    for formula in formulas[:1] if name == "dpo" else formulas:
        for number in formula.numbers:
            assert handed_over[number.symbols[-1]] == number.value, "what is shown is what the loss gets"


@pytest.mark.parametrize("recipe", [name for name in recipe_names() if "sft" not in name])
def test_every_recipe_is_explained(recipe: str) -> None:
    found = explain_algorithm(look([], recipe).config)
    shown_at = {formula.place.rpartition(":")[0] for section in found for formula in section.formulas}
    assert len(found) >= 8 and len(shown_at) >= 3, "at least an estimator, a loss and an aggregation"


def test_the_table_names_keys_that_exist_and_every_parameter_of_the_losses() -> None:
    keys = keys_of(PPOConfig)
    assert all(key in keys for parameter in PARAMETERS.values() for key in parameter.keys)
    assert set(loss_parameters(PPOConfig().actor_rollout_ref.actor)) - set(PARAMETERS) == {
        "loss_agg_mode",
        "loss_scale_factor",
    }
    assert {number.symbols[-1] for number in Run(PPOConfig()).arguments(gae, "algorithm.options")} == {
        *("gamma", "lam", "lam_critic", "lam_length_alpha")
    }


def test_functions_of_the_users_own_show_their_docstring_signature_and_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        'def shifted(token_level_rewards, response_mask, *, shift, gamma):\n    """A = γ·r − shift.\n\n    '
        'From 2401.00001."""\n\n\n'
        "def quiet(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, *, "
        "clip_low=0.1, k=3):\n    pass\n"
    )
    parts = sections(
        *("algorithm.adv_estimator=mine.py:shifted", "algorithm.options={shift: 0.5}", "algorithm.gamma=0.9"),
        f"{ACTOR}.policy_loss.loss_mode=mine.py:quiet",
    )
    mine, loss = parts["the advantage"].formulas[0], parts["the policy loss"].formulas[0]
    assert mine.equation == "A = γ·r − shift." and mine.with_numbers == "A = 0.9·r − 0.5."
    assert (
        mine.signature == "shifted(token_level_rewards, response_mask, *, shift, gamma)"
        and mine.place == "mine.py:1"
    )
    assert mine.sources == ("https://arxiv.org/abs/2401.00001",) and mine.notes == ("From 2401.00001.",)
    assert {number.key: number.value for number in mine.numbers}["algorithm.options.shift"] == 0.5
    assert loss.equation == "(no docstring)" and {n.symbols[-1]: n.value for n in loss.numbers} == {
        "clip_low": 0.2,
        "k": 3,
    }


def test_neither_model_nor_data_is_needed_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = look(
        ["data.train_files=/nowhere/x.parquet", "actor_rollout_ref.model.path=/nowhere/model"]
    ).config
    assert config.actor_rollout_ref.model.path == "/nowhere/model" and explain_algorithm(config)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm.adv_estimator=grpo"], "rollout.n"),
        (["algorithm.adv_estimator=grop"], "there are gae, grpo"),
        ([f"{ACTOR}.kl_loss_type=full"], "low_var_kl"),
        (["algorithm.gama=1"], "algorithm.gamma"),
        (["algorithm.adv_estimator=none.py:mine"], "there is no file none.py"),
    ],
)
def test_a_wrong_algorithm_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        look(words)
