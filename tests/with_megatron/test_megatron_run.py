"""GRPO, PPO and supervised runs in two and four processes: megatron-core logs what PyTorch's engine does, and
goes on from its checkpoints, as that goes on from megatron-core's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from ray_runs import assert_alike, under_ray
from tiny_run import Inputs, metrics_of, small_run, write_inputs

from hybridflow.models.tiny import create_tiny_model

ACTOR = "actor_rollout_ref.actor"


@dataclass(frozen=True)
class Layout:
    """How the processes of a run divide its models."""

    sizes: tuple[str, ...]
    """Keys below a role, which all roles share."""
    processes: int = 2
    layers: int = 2
    experts: int = 0
    critic: bool = False

    def words(self) -> list[str]:
        roles = [ACTOR, "actor_rollout_ref.ref", *["critic"] * self.critic]
        engines = [f"{role}.strategy=megatron" for role in roles if role != "actor_rollout_ref.ref"]
        return [*engines, *(f"{role}.{size}" for role in roles for size in self.sizes)]


TENSOR = "fsdp_config.tensor_parallel_size=2"
PARTS = "fsdp_config.virtual_pipeline_parallel_size=2"
STAGES = "fsdp_config.pipeline_parallel_size=2"
EXPERTS = "fsdp_config.expert_parallel_size=2"
LAYOUTS = {
    "slices": Layout((TENSOR,)),
    "stages": Layout((STAGES,)),
    "parts of stages": Layout((STAGES, PARTS), layers=4),
    "parts of rows": Layout(("ulysses_sequence_parallel_size=2",)),
    "parts of experts": Layout((EXPERTS,), experts=4),
    "slices beside experts": Layout((TENSOR, EXPERTS), experts=4),
    "slices beside whole experts": Layout((TENSOR,), experts=4),
    "slices of stages": Layout((TENSOR, STAGES), processes=4),
    "stages, and those of a critic": Layout((STAGES,), critic=True),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@cache
def model(folder: Path, experts: int, layers: int) -> Path:
    """A model whose heads two ranks share."""
    return create_tiny_model(
        folder / f"{layers} layers and {experts} experts",
        hidden=32,
        layers=layers,
        heads=4,
        kv_heads=2,
        intermediate=64,
        experts=experts,
    )


def run(folder: Path, words: Sequence[str], module: str = "main_ppo", processes: int = 2) -> str:
    log = folder.with_suffix(".log")
    command = under_ray(
        log,
        [*words, f"trainer.n_gpus_per_node={processes}"],
        module=f"hybridflow.trainer.{module}",
        cpus=processes,
    )
    try:
        done = command.wait()
    finally:
        command.kill()
    assert done.returncode == 0, done.output[-4000:]
    return done.output


def of_both_engines(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of a run, but the load of experts, which megatron-core's routers do not report."""
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith("actor/moe/")}
        for step, metrics in metrics_of(folder).items()
    }


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", LAYOUTS)
def test_runs(inputs: Inputs, tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]

    def trained(run_name: str, *more: str) -> str:
        words = small_run(
            inputs,
            tmp_path / run_name,
            f"actor_rollout_ref.model.path={model(inputs.model.parent, layout.experts, layout.layers)}",
            f"algorithm.adv_estimator={'gae' if layout.critic else 'grpo'}",
            f"{ACTOR}.use_kl_loss=true",
            "actor_rollout_ref.rollout.exact=false",
            *more,
            steps=5,
        )
        return run(tmp_path / run_name, words, processes=layout.processes)

    output = trained("there", *layout.words(), "trainer.save_freq=3")
    said = "megatron: megatron-core trains, with the sizes of its block"
    assert output.count(said) == 1 + layout.critic
    trained("here", "trainer.save_freq=3")
    wanted = of_both_engines(tmp_path / "here")
    assert sorted(wanted) == [1, 2, 3, 4, 5]
    assert_alike(wanted, of_both_engines(tmp_path / "there"), rel=1e-5)
    if layout.processes > 2:  # its parts cross on two
        return
    # each goes on from the third step of the other
    for run_name, source, more in (("crossed", "here", layout.words()), ("back", "there", ())):
        path = f"trainer.resume_from_path={tmp_path / source / 'global_step_3'}"
        trained(run_name, *more, "trainer.resume_mode=resume_path", path)
        assert_alike({step: wanted[step] for step in (4, 5)}, of_both_engines(tmp_path / run_name), rel=1e-5)


@pytest.mark.timeout(1200)
def test_supervised(inputs: Inputs, tmp_path: Path) -> None:
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
        ("slices", ("engine.strategy=megatron", "engine.tensor_parallel_size=2")),
        ("parts", ("engine.strategy=megatron", "engine.ulysses_sequence_parallel_size=2")),
    ):
        words = (
            f"data.train_files={file}",
            f"model.path={model(inputs.model.parent, 0, 2)}",
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
    assert_alike(found["here"], found["slices"], rel=1e-5)
    assert_alike(found["here"], found["parts"], rel=1e-5)
