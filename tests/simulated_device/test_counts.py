"""Ceilings of what a run asks of its device, by phase: waits of the host, launches, bytes.

They are the same on each machine. At a wait the host has nothing to give the device to do: a quiet
decode step has the one event that is taken late, a pass for log-probs and an update have one read each.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from counted_run import STEPS, quick_run
from simulated_accelerator import counts
from simulated_accelerator.counts import Counts
from simulated_accelerator.row import KIND

from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.responses import Row
from hybridflow.rollout.native.session import Session

pytestmark = pytest.mark.skipif(KIND != "gpu", reason="a device without pinned memory waits at each copy")

ACTOR = "actor_rollout_ref.actor"
COUNTED = STEPS - 1
"""Steps that are counted."""


def each(name: str) -> tuple[float, float]:
    """Return waits and launches of a phase, for each time it was entered."""
    phase = counts.phases[name]
    return phase.num_waits / phase.entered, phase.num_launches / phase.entered


def beside_decoding(phase: Counts) -> float:
    """Return the waits of a step but for the event of each step of generation."""
    events = sum(n for (_, where), n in phase.waits.items() if "native/responses.py" in where)
    return (phase.num_waits - events) / phase.entered


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        pytest.param((), 6, id="grpo"),
        pytest.param((f"{ACTOR}.use_kl_loss=true",), 7, id="reference", marks=pytest.mark.slow),
        pytest.param((f"{ACTOR}.use_prefix_grouper=true",), 6, id="shared prompts", marks=pytest.mark.slow),
        pytest.param(("actor_rollout_ref.model.lora_rank=4",), 6, id="lora", marks=pytest.mark.slow),
        pytest.param(("algorithm.adv_estimator=gae",), 10, id="ppo with critic"),
        pytest.param(
            ("algorithm.rollout_correction.bypass_mode=true",), 5, id="bypass mode", marks=pytest.mark.slow
        ),
    ],
)
def test_waits_of_a_training_step(keys: tuple[str, ...], most: int) -> None:
    quick_run(*keys)
    assert counts.phases["training step"].entered == COUNTED
    assert beside_decoding(counts.phases["training step"]) <= most, counts.report()
    assert each("quiet decode step")[0] == 1
    assert each("prefill")[0] == 0
    assert each("rows end")[0] == 0
    if "log-prob pass" in counts.phases:  # bypass mode has none
        assert each("log-prob pass")[0] <= 1
    assert each("update")[0] <= 1
    if not keys:  # launches of two layers
        assert (
            each("quiet decode step")[1] <= 16
        )  # recorded, the choice of the tokens too: whatever the model
        assert each("log-prob pass")[1] <= 140
        assert each("update")[1] <= 540


@pytest.mark.parametrize(
    ("limit", "leaders"),
    [
        ("top_p=0.9", 4),
        pytest.param("top_p=0.9", 1024, marks=pytest.mark.slow),
        pytest.param("top_k=200", 4, marks=pytest.mark.slow),
        pytest.param("top_k=200", 1024, marks=pytest.mark.slow),
    ],
)
def test_a_quiet_decode_step_does_not_wait_to_learn_whether_the_leaders_suffice(
    limit: str, leaders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vocabulary is larger than what is sorted as it is; with 4 leaders rows are taken back."""
    monkeypatch.setattr(sampling, "ONE_LEVEL", 24)
    monkeypatch.setattr(sampling, "BLOCK", 8)
    monkeypatch.setattr(sampling, "LEADERS", min(sampling.LEADERS, leaders))
    monkeypatch.setattr(sampling, "MANY_LEADERS", leaders)
    taken_back: list[int] = []
    own = Session._take_back

    def take_back(session: Session, rows: Sequence[Row]) -> None:
        taken_back.append(len(rows))
        own(session, rows)

    monkeypatch.setattr(Session, "_take_back", take_back)
    # recording counts as launches, which more steps share
    quick_run(f"actor_rollout_ref.rollout.{limit}", steps=3 if leaders == 1024 else 2)
    assert each("quiet decode step")[0] == 1
    if leaders == 1024:
        assert not taken_back and each("quiet decode step")[1] <= 16
    else:
        assert bool(taken_back) == (limit == "top_p=0.9")


@pytest.mark.slow
def test_an_update_waits_once_whatever_its_micro_batches() -> None:
    quick_run(f"{ACTOR}.ppo_max_token_len_per_gpu=128", f"{ACTOR}.use_dynamic_bsz=true")
    assert each("update")[0] == 1 and each("log-prob pass")[0] == 1
    assert counts.phases["update"].launches["_flash_attention_backward"] == 0  # float32: no kernel for it
    assert each("update")[1] > 1500  # there were several


def test_packed_rows_in_bfloat16_are_one_call_of_attention_a_layer() -> None:
    few = ("actor_rollout_ref.rollout.n=2", "actor_rollout_ref.rollout.max_num_seqs=16")
    quick_run("actor_rollout_ref.model.dtype=bfloat16", *few, steps=2)
    for name in ("update", "log-prob pass"):
        phase = counts.phases[name]
        assert phase.launches["_flash_attention_forward"] == 2 * phase.entered, counts.report()
        assert phase.num_waits / phase.entered <= 1
    assert each("quiet decode step")[0] == 1 and each("prefill")[0] == 0


def test_launches_of_two_layers_that_are_not_recorded() -> None:
    quick_run("actor_rollout_ref.rollout.enforce_eager=true", steps=2)
    assert each("quiet decode step")[1] <= 135
