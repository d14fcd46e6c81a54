"""What the catalog says of estimators and losses, beside what their papers ask for."""

from __future__ import annotations

import pytest

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES, described

THROUGHOUT = set(ESTIMATORS)


@pytest.mark.parametrize(
    ("fact", "names"),
    [
        ("group", THROUGHOUT - {"gae", "reinforce_plus_plus", "remax", "spin", "on_policy_distillation"}),
        ("critic", {"gae"}),
        ("teacher", {"on_policy_distillation"}),
        ("process_rewards", {"prime"}),
        ("token_rewards", THROUGHOUT - {"gdpo", "spin", "on_policy_distillation"}),
        ("actor_pass", {"optimal_token_baseline", "tir_optimal_token_baseline"}),
        ("greedy_rows", {"remax"}),
        ("demonstration_rows", {"spin"}),
    ],
)
def test_what_estimators_need(fact: str, names: set[str]) -> None:
    assert {name for name, facts in ESTIMATORS.items() if getattr(facts, fact)} == names


def test_which_losses_leave_ppo_s_clip_range() -> None:
    """GSPO clips a mean over a sequence, GMPO a geometric mean, CISPO nothing from below."""
    found = {name: facts.clip for name, facts in POLICY_LOSSES.items() if facts.clip is not None}
    assert found == {
        "gspo": (3e-4, 4e-4),
        "geo_mean": (0.4, 0.4),
        "gmpo": (0.4, 0.4),
        "cispo": (1.0, 0.28),
    }
    assert {name for name, facts in POLICY_LOSSES.items() if facts.clip_c} == {"dppo_tv", "dppo_kl"}


def test_which_losses_take_the_mean_of_each_row() -> None:
    by_mode: dict[str, set[str]] = {}
    for name, facts in POLICY_LOSSES.items():
        by_mode.setdefault(facts.agg_mode, set()).add(name)
    assert by_mode.pop("seq-mean-token-mean") == {"gspo", "sapo", "geo_mean", "gmpo"}
    assert by_mode.pop("seq-mean-token-sum") == {"sppo", "dpo"}
    assert set(by_mode) == {"token-mean"}


def test_what_losses_read() -> None:
    """A loss reads what its `select` reads, once; what every loss is given is not listed."""
    assert POLICY_LOSSES["reinforce"].reads == ()
    assert POLICY_LOSSES["vanilla"].reads == ("clip_low", "clip_high", "clip_c")
    assert POLICY_LOSSES["kl_cov"].selects == ("kl_cov_ratio",)
    assert POLICY_LOSSES["kl_cov"].reads == ("kl_cov_selected", "ppo_kl_coef", "kl_cov_ratio")
    assert [name for name, facts in POLICY_LOSSES.items() if facts.reference or facts.pairs] == ["dpo"]


def test_the_source_is_read_and_not_run() -> None:
    """A function's formula, defaults and papers; of a class the formula and the place alone."""
    gspo = POLICY_LOSSES["gspo"].described
    assert gspo.defaults["clip_low"] == 3e-4
    assert "2507.18071" in gspo.papers
    assert gspo.formula and not gspo.formula.endswith(".")
    assert "gspo.py:" in gspo.place
    own = described("hybridflow.algorithms.catalog:Description")
    assert own.formula == "What the source of a function, or of a class, says of it"
    assert (own.arguments, own.defaults) == ((), {})
