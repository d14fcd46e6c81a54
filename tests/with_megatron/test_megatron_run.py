"""GRPO and supervised runs in two processes: megatron-core logs what PyTorch's engine does, and goes on from
its checkpoints, as that goes on from megatron-core's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from ray_runs import assert_alike, under_ray
from tiny_run import Inputs, metrics_of, small_run, write_inputs

from hybridflow.models.tiny import create_tiny_model

ROLES = ("actor_rollout_ref.actor", "actor_rollout_ref.ref")
LAYOUTS = {
    "slices": [f"{role}.fsdp_config.tensor_parallel_size=2" for role in ROLES],
    "stages": [f"{role}.fsdp_config.pipeline_parallel_size=2" for role in ROLES],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads two ranks share."""
    return create_tiny_model(
        tmp_path_factory.mktemp("model"), hidden=32, layers=2, heads=4, kv_heads=2, intermediate=64
    )


def run(folder: Path, words: Sequence[str], module: str = "main_ppo") -> str:
    log = folder.with_suffix(".log")
    command = under_ray(log, [*words, "trainer.n_gpus_per_node=2"], module=f"hybridflow.trainer.{module}")
    try:
        done = command.wait()
    finally:
        command.kill()
    assert done.returncode == 0, done.output[-4000:]
    return done.output


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_grpo(inputs: Inputs, model: Path, tmp_path: Path, layout: str) -> None:
    def words(name: str, *more: str, steps: int = 5) -> list[str]:
        return small_run(
            inputs,
            tmp_path / name,
            f"actor_rollout_ref.model.path={model}",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.rollout.exact=false",
            *more,
            steps=steps,
        )

    megatron = ("actor_rollout_ref.actor.strategy=megatron", *LAYOUTS[layout])
    output = run(tmp_path / "there", words("there", *megatron, "trainer.save_freq=3"))
    assert "megatron-core trains, with the sizes of its block" in output
    run(tmp_path / "here", words("here", "trainer.save_freq=3"))
    wanted = metrics_of(tmp_path / "here")
    assert sorted(wanted) == [1, 2, 3, 4, 5]
    assert_alike(wanted, metrics_of(tmp_path / "there"), rel=1e-4)
    # each goes on from the third step of the other
    for name, source, more in (("crossed", "here", megatron), ("back", "there", ())):
        path = f"trainer.resume_from_path={tmp_path / source / 'global_step_3'}"
        run(tmp_path / name, words(name, *more, "trainer.resume_mode=resume_path", path))
        assert_alike({step: wanted[step] for step in (4, 5)}, metrics_of(tmp_path / name), rel=1e-4)


@pytest.mark.timeout(1200)
def test_supervised(model: Path, tmp_path: Path) -> None:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"{a} + 1 = ?"},
                {"role": "assistant", "content": str(a + 1)},
            ]
        }
        for a in range(12)
    ]
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}
    for name, more in (
        ("here", ()),
        ("there", ("engine.strategy=megatron", "engine.tensor_parallel_size=2")),
    ):
        words = (
            f"data.train_files={file}",
            f"model.path={model}",
            "model.enable_gradient_checkpointing=false",
            "data.train_batch_size=4",
            "optim.lr=1e-3",
            "trainer.total_training_steps=5",
            "trainer.logger=[]",
            "trainer.num_threads=1",
            f"trainer.default_local_dir={tmp_path / name}",
            *more,
        )
        run(tmp_path / name, words, "main_sft")
        found[name] = metrics_of(tmp_path / name)
    assert sorted(found["here"]) == [1, 2, 3, 4, 5]
    assert_alike(found["here"], found["there"], rel=1e-4)
