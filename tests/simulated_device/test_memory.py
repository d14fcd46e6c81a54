"""The most memory that a colocated step takes of its device, by phase, is what the planner says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from counted_run import counted_run, quick_run
from simulated_accelerator import counts
from simulated_accelerator.row import KIND

from hybridflow.explain.run import explain_run
from hybridflow.models.tiny import create_tiny_model

MIB = 2**20
SIZES = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "intermediate": 1024}
WITHIN = 0.1


@pytest.mark.skipif(KIND != "gpu", reason="the plan is that of a device like CUDA")
@pytest.mark.parametrize("offload", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_peaks_of_a_step_are_those_of_the_plan(offload: bool, tmp_path: Path) -> None:
    model = create_tiny_model(tmp_path / "model", **SIZES)
    keys = ["data.max_response_length=64", "actor_rollout_ref.rollout.ignore_eos=true"]
    keys += ["actor_rollout_ref.model.dtype=float32", "critic.model.dtype=float32"]
    if offload:
        keys += [
            "actor_rollout_ref.actor.fsdp_config.param_offload=true",
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true",
        ]
        config, metrics = counted_run("algorithm.adv_estimator=gae", *keys, model=model)
    else:  # a quarter of the rows and one counted step are enough
        few = (
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
        )
        config, metrics = quick_run("algorithm.adv_estimator=gae", *keys, *few, model=model, steps=2)
    # the plan is for rows of the greatest length, and prompts were shorter than that
    data = replace(config.data, max_prompt_length=round(metrics["prompt_length/mean"]))
    config = replace(config, data=data, trainer=replace(config.trainer, device="cuda"))
    said = {line.label: line.value for line in explain_run(config)}
    for label, phase in (("memory while updating", "update"), ("memory while generating", "prefill")):
        planned = float(re.match(r"[0-9.]+(?= MiB)", said[label])[0])  # type: ignore[index]
        taken = counts.phases[phase].peak / MIB
        assert taken == pytest.approx(planned, rel=WITHIN), (label, said)
