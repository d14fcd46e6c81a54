"""The formulas of a run: a docstring's equation with the run's numbers, in the order of the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridflow.algorithms.advantages.grpo import grpo
from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES
from hybridflow.cli.explain_view import show_algorithm
from hybridflow.config import PPOConfig
from hybridflow.config.load import Loaded, prepare_config
from hybridflow.config.recipes import COMPARISONS, recipe_names
from hybridflow.explain.algorithm import Section, explain_algorithm
from hybridflow.explain.formula import Number, filled_in, own_formula, place, shown
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


def look(overrides: Sequence[str], recipe: str | None = None) -> Loaded[PPOConfig]:
    """What `hybridflow explain` shows: a run without its model and its data."""
    return prepare_config(PPOConfig, overrides, recipe, runs=False, needs_model=False, needs_files=False)


def sections(*overrides: str) -> dict[str, Section]:
    found = explain_algorithm(look(overrides).config)
    return {section.title.partition(":")[0]: section for section in found}


@pytest.mark.parametrize(
    ("formula", "value", "filled"),
    [
        ("δ + λ·L; λ_t, λ_critic, λs", 0.95, "δ + 0.95·L; λ_t, λ_critic, λs"),
        ("x − λ·y", -0.5, "x − (−0.5)·y"),
        ("at most λ", None, "at most λ"),
        ("w is λ", [1, 2], "w is λ"),
        ("A = this, or that without `x`; s", True, "A = this; s"),
        ("A = this, or that without `x`, s", False, "A = that, s"),
        ("a = b, c = 1/λ, in [0, 1], or 0 without `x`; s", None, "a = b, c = 0; s"),
        ("A = 1/λ, or 1 without `x`; s", 0.0, "A = 1/0.0; s"),
        ("Σ_{t' ≥ t} λ", 2, "Σ_{t' ≥ t} 2"),
    ],
)
def test_numbers_stand_where_the_symbols_stood(formula: str, value: object, filled: str) -> None:
    assert filled_in(formula, [Number("x", value, "a.key", "λ")]) == filled


def test_the_exact_kl_is_explained() -> None:
    parts = sections(f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full")
    formulas = parts["further terms of the loss"].formulas
    (exact,) = [formula for formula in formulas if formula.name == "exact KL over the vocabulary"]
    assert exact.equation.startswith("KL(π ‖ π_ref) = Σ_v π(v)·(log π(v) − log π_ref(v))")


def test_a_divergence_from_a_teacher_is_explained() -> None:
    loss = "distillation.distillation_loss"
    path = "distillation.teacher_model.path=org/teacher"
    part = sections(f"{loss}.loss_mode=jsd_topk", f"{loss}.use_task_rewards=false", path)[
        "further terms of the loss"
    ]
    assert any("divergence from the teacher, aggregated alike, in place of" in line for line in part.lines)
    (formula,) = [formula for formula in part.formulas if formula.name == "divergence"]
    assert formula.equation.startswith("forward_kl: KL(q ‖ p); reverse_kl: KL(p ‖ q); jsd: β·KL(q ‖ m)")
    assert [number.value for number in formula.numbers] == ["jsd_topk", 0.5, 128, "bucket"]


def test_a_place_is_the_line_of_the_function() -> None:
    file, _, line = place(grpo).rpartition(":")
    assert Path(file).read_text().splitlines()[int(line) - 1].startswith("def grpo(")
    assert place(len) == "(no source)"


def test_a_function_without_a_docstring_says_so() -> None:
    def bare(x: int) -> int:
        return x

    formula = own_formula(bare, [Number("x", 1, "key")])
    assert formula.equation == "(no docstring)" and formula.signature == "bare(x)"


def test_values_are_shown_as_a_user_types_them() -> None:
    assert [shown(v) for v in (None, True, False, 0.0002, 8, -0.5, [1.0, 2], "token")] == [
        *("null", "true", "false", "0.0002", "8", "−0.5", "[1.0, 2]", "token")
    ]


CASES = """
GRPO with clip-higher: actor_rollout_ref.actor.clip_ratio_high=0.28
1. rewards¦2. which rows are learned from¦3. rollout correction¦4. the advantage¦5. the policy loss
6. from token losses to one number¦7. further terms of the loss¦8. steps of a batch
(s − μ_g)/(σ_g + 1e-6)¦norm_by_std = true   (algorithm.norm_adv_by_std_in_grpo
n = 8   (actor_rollout_ref.rollout.n
clip(ρ, 1 − 0.2, 1 + 0.28)¦−A·3.0¦0.2   (actor_rollout_ref.actor.clip_ratio:
0.28   (actor_rollout_ref.actor.clip_ratio_high:¦3.0   (actor_rollout_ref.actor.clip_ratio_c:
is measured (rollout_corr/*)¦not the value loss¦not resampling of rows

Dr. GRPO: algorithm.norm_adv_by_std_in_grpo=false data.max_response_length=100 \
actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
     A = s − μ_g, on every token of a row; s =¦     loss = Σ_i Σ_t/(2048·100.0)

GAE: algorithm.adv_estimator=gae algorithm.lam=0.95 algorithm.gamma=0.99
0.99·λ_t·L_next¦λ_t = 0.95

VAPO: algorithm.adv_estimator=gae algorithm.lam_length_alpha=0.05 algorithm.lam_critic=1.0
L with λ_t = 1.0 there; λ_t = 1 − 1/(0.05·len), clamped to [0, 1]¦= 0.05   (algorithm.lam_length_alpha

DPO: algorithm.adv_estimator=online_dpo actor_rollout_ref.actor.policy_loss.loss_mode=dpo \
actor_rollout_ref.actor.policy_loss.dpo_beta=0.2
h = 0.2·(Δ_chosen − Δ_rejected)¦   the rows of a prompt stay together in a micro-batch

IPO: algorithm.adv_estimator=online_dpo actor_rollout_ref.actor.policy_loss.loss_mode=dpo \
actor_rollout_ref.actor.policy_loss.dpo_beta=0.2 actor_rollout_ref.actor.policy_loss.dpo_loss=ipo
1/(2·0.2)

symbols and names: actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv
ε_low = clip_low = 0.2   (¦ε_high = clip_high = 0.2   (¦c = clip_c = 20.0   (

every term: algorithm.adv_estimator=gae algorithm.use_kl_in_reward=true algorithm.kl_ctrl.type=adaptive \
algorithm.kl_ctrl.kl_coef=0.2 algorithm.use_pf_ppo=true algorithm.filter_groups.enable=true \
algorithm.overlong_filtering=true actor_rollout_ref.actor.entropy_coeff=0.01 \
actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_type=k3+ \
actor_rollout_ref.actor.positive_lm_loss_coef=0.1 algorithm.rollout_correction.rollout_is=token \
algorithm.rollout_correction.rollout_rs=token_k1 algorithm.rollout_correction.rollout_rs_threshold='0.5_2.0' \
reward.reward_kwargs.overlong_buffer_cfg.enable=true reward.reward_kwargs.overlong_buffer_cfg.len=128
token_level_rewards = scores - 0.2 * kl¦kl/0.1 − 1¦8192/10000¦(512 − 128)¦   dynamic sampling
   overlong filtering¦   importance weights¦   rejection¦|s|^2.0¦not w = 1 where s¦   − 0.01 · entropy
   + 0.001 · kl¦   + 0.1 · ¦its gradient is that of k2: ½(x − y)²¦V ± 0.5
   optimizer steps per step: 4 (4 mini-batches × actor.ppo_epochs=1)

what the engine reported: algorithm.rollout_correction.bypass_mode=true \
reward.terms=[{name:gsm8k,weight:1},{name:length,weight:-0.1}]
bypass_mode=true¦is measured (rollout_corr/*)¦   scores s by reward.terms: 1·gsm8k + -0.1·length

whole conversations: actor_rollout_ref.rollout.multi_turn.enable=true data.max_prompt_length=100 \
actor_rollout_ref.rollout.max_model_len=1024 data.max_response_length=100
   turns of the model in a conversation, at most: as many as fit¦8 whole conversations × 1024 tokens
"""
"""Each case: its name and its overrides, then texts that are printed, or not."""


@pytest.mark.parametrize("case", CASES.strip().split("\n\n"), ids=lambda case: case.partition(":")[0])
def test_what_is_printed(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    head, *wanted = case.splitlines()
    show_algorithm(look([*GROUP, *head.partition(": ")[2].split()]).config)
    printed = capsys.readouterr().out
    for text in "¦".join(wanted).split("¦"):
        assert (text.removeprefix("not ") in printed) == (not text.startswith("not ")), text


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_explained(name: str) -> None:
    words = [
        f"algorithm.adv_estimator={name}",
        "actor_rollout_ref.rollout.n=8",
        *BESIDE_ESTIMATOR.get(name, []),
    ]
    formula = sections(*words)["the advantage"].formulas[0]
    assert "=" in formula.equation, "the first paragraph holds the equation, the module names the paper"
    assert formula.sources, "the first paragraph holds the equation, the module names the paper"
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
            assert handed_over[number.name] == number.value, "what is shown is what the loss gets"


PPO = [name for name in recipe_names() if "sft" not in name and Path(name).name not in COMPARISONS]


@pytest.mark.parametrize("recipe", PPO)
def test_every_recipe_is_explained(recipe: str) -> None:
    found = explain_algorithm(look([], recipe).config)
    shown_at = {formula.place.rpartition(":")[0] for section in found for formula in section.formulas}
    assert len(found) >= 8 and len(shown_at) >= 3, "at least an estimator, a loss and an aggregation"


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
    assert mine.equation == "A = γ·r − shift." and not mine.with_numbers
    assert mine.signature == "shifted(token_level_rewards, response_mask, *, shift, gamma)"
    assert mine.place == "mine.py:1"
    assert mine.notes == ("From 2401.00001.",)
    assert {number.key: number.value for number in mine.numbers}["algorithm.options.shift"] == 0.5
    assert loss.equation == "(no docstring)"
    assert {n.name: n.value for n in loss.numbers} == {
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
