"""A run's state: saved and taken over whole or in part, and refused where it belongs to another run."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from tiny_trainer import actor_module, build, ppo_config, tiny_model

from hybridflow.checkpoint.layout import DATA, TRAINER
from hybridflow.checkpoint.shard_index import read_index
from hybridflow.checkpoint.sharded import load_shards
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.errors import CheckpointError
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.resume import check_belongs
from hybridflow.workers.state import StatefulGroup

KL = (
    "algorithm.use_kl_in_reward=true",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=50",
    "data.task.size=9",
)
PARTS = ("model", "optimizer", "scheduler")
GRPO = ("algorithm.adv_estimator=grpo",)


def states(trainer: PPOTrainer) -> dict[str, Any]:
    roles = trainer.step.roles
    groups = {
        "actor": roles.actor,
        "critic": roles.critic,
        "reference": roles.reference,
        "process_reward": roles.process_reward,
    }
    engines = {name: engine_state(group) for name, group in groups.items() if group}
    return {
        **engines,
        "loader": deepcopy(trainer.source.loader.state_dict()),
        "kl": trainer.step.kl_controller.state_dict(),
        "step": trainer.state.step,
    }


def engine_state(group: StatefulGroup[Any]) -> Any:
    """All of an engine's state, as its ranks would save it."""
    with TemporaryDirectory() as folder:
        group.save(Path(folder), PARTS)
        return read_engine(Path(folder))


def read_engine(folder: Path) -> Any:
    return load_shards(folder, {part: {} for part in read_index(folder).structure})


def equal(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(equal(value, theirs[key]) for key, value in ours.items())
    return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_a_saved_run_is_taken_over_whole(model: Path, tmp_path: Path) -> None:
    """Weights, moments, counters, data position in the second epoch, KL coefficient and step."""
    with build(
        ppo_config(model, tmp_path / "run", *KL, "trainer.total_training_steps=3", "trainer.save_freq=3")
    ) as trainer:
        fresh = states(trainer)
        trainer.fit()
        done = states(trainer)
    assert done["loader"]["epoch"] == 1 and done["kl"] != fresh["kl"] and done["step"] == 3
    assert done["actor"]["scheduler"]["num_steps"] == done["critic"]["scheduler"]["num_steps"] == 6
    with build(ppo_config(model, tmp_path / "run", *KL, "trainer.total_training_steps=3")) as resumed:
        assert equal(states(resumed), done)
        assert resumed.fit() == {}, "nothing is left to do"
    path = tmp_path / "run" / "global_step_3"
    elsewhere = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path='{path}'")
    with build(ppo_config(model, tmp_path / "other", *KL, *elsewhere)) as resumed:
        assert equal(states(resumed), done)
    with build(ppo_config(model, tmp_path / "run", *KL, "trainer.resume_mode=disable")) as anew:
        assert equal(states(anew), fresh)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model"], {"model"}),
        (["model", "extra"], {"model", "scheduler"}),
        (["model", "optimizer"], {"model", "optimizer"}),
        (["model", "hf_model"], {"model"}),
        ([], set()),
    ],
)
def test_a_checkpoint_holds_what_was_asked_for(
    model: Path, tmp_path: Path, words: list[str], parts: set[str]
) -> None:
    contents = f"actor_rollout_ref.actor.checkpoint.save_contents=[{','.join(words)}]"
    with build(ppo_config(model, tmp_path / "run", *GRPO, contents)) as trainer:
        trainer.state.step = 1
        path = trainer.state.save(trainer.store)
    loaded = CheckpointStore(tmp_path / "run").load(path)
    assert loaded.engines == {"actor": parts} and set(loaded.state) == {"data", "trainer"}
    assert (path / "actor" / "huggingface" / "config.json").is_file()
    assert any((path / "actor" / "huggingface").glob("*.safetensors")) == ("hf_model" in words)


def test_load_contents_choose_what_is_read(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", *GRPO, "trainer.save_freq=2")) as trainer:
        trainer.fit()
        done = states(trainer)
    with build(
        ppo_config(model, tmp_path / "run", *GRPO, "actor_rollout_ref.actor.checkpoint.load_contents=[model]")
    ) as resumed:
        found = states(resumed)
    assert equal(found["actor"]["model"], done["actor"]["model"]) and found["step"] == 2
    moments = [tensor for state in found["actor"]["optimizer"].values() for tensor in state.values()]
    assert found["actor"]["scheduler"]["num_steps"] == 0 and not any(bool(tensor.any()) for tensor in moments)
    with build(
        ppo_config(
            model,
            tmp_path / "run",
            *GRPO,
            "actor_rollout_ref.actor.checkpoint.load_contents=[optimizer,extra]",
        )
    ) as resumed:
        found = states(resumed)
    assert not equal(found["actor"]["model"], done["actor"]["model"]) and equal(
        found["actor"]["optimizer"], done["actor"]["optimizer"]
    )


def test_what_the_checkpoint_lacks_is_said(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for words in ("model", ""):
        with build(
            ppo_config(
                model,
                tmp_path / f"run_{words}",
                *GRPO,
                f"actor_rollout_ref.actor.checkpoint.save_contents=[{words}]",
            )
        ) as trainer:
            trainer.state.step = 1
            trainer.state.save(trainer.store)
    with caplog.at_level(logging.WARNING), build(ppo_config(model, tmp_path / "run_model", *GRPO)):
        assert "no optimizer and no scheduler of the actor" in caplog.text
    with (
        pytest.raises(CheckpointError, match="no model of the actor"),
        build(ppo_config(model, tmp_path / "run_", *GRPO)),
    ):
        pass


def test_a_checkpoint_of_another_run_is_refused(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", *GRPO)) as trainer:
        trainer.state.step = 1
        trainer.state.save(trainer.store)
    other_seed = ppo_config(model, tmp_path / "run", *GRPO, "trainer.seed=7")
    wanted = r"trainer\.seed=1, this one has 7: set the same seed.*trainer\.resume_mode=disable"
    with pytest.raises(CheckpointError, match=wanted), build(other_seed):
        pass
    with pytest.raises(CheckpointError, match="has no 'critic'"), build(ppo_config(model, tmp_path / "run")):
        pass
    wider = tiny_model(tmp_path / "wider", hidden=64)
    with (
        pytest.raises(CheckpointError, match=r"\(.*32.*\) in the checkpoint and \(.*64.*\) here"),
        build(ppo_config(wider, tmp_path / "run", *GRPO, "trainer.resume_other_model=true")),
    ):
        pass


def test_a_drivers_state_that_no_run_wrote_is_refused(model: Path, tmp_path: Path) -> None:
    whole = {"kind": "ppo", "step": 1, "seed": 1, "kl_controller": {"value": 0.1}, "exact": {"ended": False}}
    whole |= {"validation_due": False}
    for odd in ([], None, "ppo", {"kind": "ppo"}, {"kind": "ppo", "seed": []}, {"kind": "ppo", "seed": "x"}):
        with pytest.raises(CheckpointError, match="was not written by a run"):
            check_belongs({TRAINER: odd}, kind="ppo", seed=1)
    with pytest.raises(CheckpointError, match="of kind None"):
        check_belongs({}, kind="ppo", seed=1)
    with build(ppo_config(model, tmp_path / "run", *GRPO)) as trainer:
        trainer.state.step = 1
        loaded = trainer.store.load(trainer.state.save(trainer.store))
        position = loaded.state[DATA]
        for data, fields in (
            ([], whole),
            ({}, whole),
            ({**position, "epoch": "first"}, whole),
            (position, {**whole, "step": None}),
            (position, {**whole, "kl_controller": 3}),
        ):
            forged = replace(loaded, state={DATA: data, TRAINER: fields})
            with pytest.raises(CheckpointError, match="was not written by a run"):
                trainer.state.restore(forged)
        trainer.state.restore(loaded)


PROCESS = """
def process(token_level_rewards, response_mask, process_rewards):
    total = ((token_level_rewards + process_rewards) * response_mask).sum(-1, keepdim=True) * response_mask
    return total, total
"""


def moving(folder: Path) -> tuple[str, ...]:
    """A run whose reference moves after step 2 and whose process reward model learns in every step."""
    (folder / "process.py").write_text(PROCESS)
    return (
        f"algorithm.adv_estimator='{folder / 'process.py'}:process'",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=1.0",
        "algorithm.ref_update_freq=2",
        "reward.process_reward_model.optim.lr=1e-2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=2",
    )


def test_a_moving_reference_and_a_process_reward_model_go_on_to_the_bit(model: Path, tmp_path: Path) -> None:
    settings = moving(tmp_path)
    with build(ppo_config(model, tmp_path / "whole", *settings)) as trainer:
        fresh = states(trainer)
        trainer.fit()
        whole = states(trainer)
    assert whole["process_reward"]["scheduler"]["num_steps"] == 3
    assert not equal(whole["reference"]["model"], fresh["reference"]["model"])
    assert not equal(whole["reference"]["model"], whole["actor"]["model"]), (
        "the third step was taken against it"
    )
    path = tmp_path / "whole" / "global_step_2"
    assert CheckpointStore(tmp_path / "whole").load(path).engines == {
        "actor": set(PARTS),
        "reference": {"model"},
        "process_reward": set(PARTS),
    }
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path='{path}'")
    with build(ppo_config(model, tmp_path / "resumed", *settings, *resume)) as trainer:
        assert (
            equal(states(trainer)["reference"]["model"], read_engine(path / "reference")["model"])
            and trainer.state.step == 2
        )
        trainer.fit()
        assert equal(states(trainer), whole)


def test_a_reference_that_moved_is_kept_where_it_moves_no_more(model: Path, tmp_path: Path) -> None:
    with build(
        ppo_config(model, tmp_path / "run", *GRPO, *KL, "algorithm.ref_update_freq=1", "trainer.save_freq=2")
    ) as trainer:
        trainer.fit()
        moved = states(trainer)
    assert equal(moved["reference"]["model"], moved["actor"]["model"])
    for _ in range(2):  # the second time from a checkpoint of the run that does not move it
        with build(ppo_config(model, tmp_path / "run", *GRPO, *KL)) as trainer:
            assert equal(states(trainer)["reference"], moved["reference"])
            trainer.state.step += 1
            trainer.state.save(trainer.store)


def test_a_still_reference_is_no_part_of_a_checkpoint(model: Path, tmp_path: Path) -> None:
    with build(ppo_config(model, tmp_path / "run", *GRPO, *KL)) as trainer:
        trainer.state.step = 1
        assert "reference" not in trainer.store.load(trainer.state.save(trainer.store)).engines
    wanted = r"has no 'reference'.*"
    with (
        pytest.raises(CheckpointError, match=wanted),
        build(ppo_config(model, tmp_path / "run", *GRPO, *KL, "algorithm.ref_update_freq=1")),
    ):
        pass


def test_weights_are_taken_over_in_place(model: Path, tmp_path: Path) -> None:
    with build(
        ppo_config(model, tmp_path / "run", *GRPO, "trainer.save_freq=1", "trainer.total_training_steps=1")
    ) as trainer:
        state, saved = states(trainer), trainer.state.save(trainer.store)
        trainer.fit()
        assert not equal(states(trainer)["actor"], state["actor"])
        pointers = [parameter.data_ptr() for parameter in actor_module(trainer).parameters()]
        trainer.state.restore(trainer.store.load(saved))
        assert [parameter.data_ptr() for parameter in actor_module(trainer).parameters()] == pointers
        assert equal(states(trainer)["actor"], state["actor"]) and trainer.state.step == 0
