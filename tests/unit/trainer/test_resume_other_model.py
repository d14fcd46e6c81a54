"""A run goes on from a checkpoint with the model, adapters and tokenizer that it was made with, or not."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import build, ppo_config, sft_config, tiny_model

from hybridflow.errors import CheckpointError
from hybridflow.trainer.resume import check_resume, model_facts
from hybridflow.trainer.sft.build import build as build_sft

ONE_STEP = ("trainer.total_training_steps=1", "trainer.save_freq=1")
MODEL = "actor_rollout_ref.model"
LORA = (f"{MODEL}.lora_rank=2", f"{MODEL}.lora_alpha=4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, and runs of one step: PPO without and with adapters, and a supervised one."""
    folder = tmp_path_factory.mktemp("runs")
    tiny_model(folder / "model")
    shutil.copytree(folder / "model", folder / "copy")
    tiny_model(folder / "other", seed=5)
    tiny_model(folder / "wider", intermediate=64)
    shutil.copytree(folder / "model", folder / "words")
    vocabulary = json.loads((folder / "words" / "tokenizer.json").read_text())
    vocabulary["added_tokens"] = vocabulary["added_tokens"][::-1]
    (folder / "words" / "tokenizer.json").write_text(json.dumps(vocabulary))
    two = (*LORA, f"{MODEL}.target_modules=[q_proj,v_proj]")
    for name, keys in (("plain", ()), ("lora", LORA), ("two", two)):
        with build(ppo_config(folder / "model", folder / name, *GRPO, *ONE_STEP, *keys)) as trainer:
            trainer.fit()
    with build_sft(sft_config(folder / "model", folder / "sft", *ONE_STEP)) as trainer:
        trainer.fit()
    return folder


GRPO = ("algorithm.adv_estimator=grpo",)
FROM = "trainer.resume_mode=resume_path"


@pytest.mark.parametrize(
    ("run", "model", "keys", "changed"),
    [
        ("plain", "model", [], []),
        ("plain", "copy", [], []),
        ("plain", "other", [], [f"{MODEL}.path: llama "]),
        ("plain", "other", ["trainer.resume_mode=disable"], []),
        ("plain", "other", ["trainer.resume_other_model=true"], []),
        ("plain", "wider", [], [f"{MODEL}.path: llama "]),
        ("plain", "words", [], ["data.tokenizer: tokenizer "]),
        ("plain", "model", ["data.tokenizer={folder}/words"], ["data.tokenizer: tokenizer "]),
        ("plain", "model", list(LORA), [f"{MODEL}.lora_rank: 0 → 2", f"{MODEL}.lora_alpha: None → 4"]),
        (
            "plain",
            "model",
            [f"{MODEL}.override_config={{rope_theta: 5000}}"],
            [f"{MODEL}.override_config: {{}} → {{'rope_theta': 5000}}"],
        ),
        # keys of adapters that there are none of
        ("plain", "model", [f"{MODEL}.lora_alpha=3", f"{MODEL}.target_modules=[q_proj]"], []),
        # a role that the checkpoint does not have is missed when it is loaded
        ("plain", "model", ["algorithm.adv_estimator=gae"], []),
        ("plain", "model", ["algorithm.adv_estimator=rloo", f"{MODEL}.dtype=float64"], []),
        ("lora", "model", list(LORA), []),
        ("lora", "model", [LORA[0], f"{MODEL}.lora_alpha=8"], [f"{MODEL}.lora_alpha: 4 → 8"]),
        ("lora", "model", [LORA[1], f"{MODEL}.lora_rank=4"], [f"{MODEL}.lora_rank: 2 → 4"]),
        (
            "lora",
            "model",
            [*LORA, f"{MODEL}.target_modules=[q_proj]"],
            [f"{MODEL}.target_modules: all-linear → ['q_proj']"],
        ),
        ("lora", "model", [], [f"{MODEL}.lora_rank: 2 → 0"]),
        ("two", "model", [*LORA, f"{MODEL}.target_modules=[v_proj,q_proj]"], []),
        (
            "new",
            "other",
            [FROM, "trainer.resume_from_path={folder}/plain/global_step_1"],
            [f"{MODEL}.path: llama "],
        ),
        ("new", "copy", [FROM, "trainer.resume_from_path={folder}/plain/global_step_1"], []),
        ("new", "other", [], []),
    ],
)
def test_what_a_checkpoint_was_made_with(
    runs: Path, run: str, model: str, keys: list[str], changed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    given = [key.replace("{folder}", str(runs)) for key in keys]
    config = ppo_config(runs / model, runs / run, *GRPO, *given)
    with (
        pytest.raises(CheckpointError) if changed else nullcontext() as refused,
        caplog.at_level(logging.WARNING),
    ):
        check_resume(config)
    for line in changed:
        message = str(refused.value)
        assert line in message and "trainer.resume_mode=disable" in message, message
    if "trainer.resume_other_model=true" in keys:
        assert (
            "the checkpoint was made with another model (actor_rollout_ref.model.path: llama " in caplog.text
        )


def test_it_is_refused_when_it_is_loaded_too_and_in_supervised_runs(runs: Path) -> None:
    wrong = "was made with another model than this run has"
    with (
        pytest.raises(CheckpointError, match=wrong),
        build(ppo_config(runs / "other", runs / "plain", *GRPO)),
    ):
        pass
    for model, keys in (("other", []), ("model", ["model.lora_rank=2"])):
        config = sft_config(runs / model, runs / "sft", *keys)
        with pytest.raises(CheckpointError, match=wrong):
            check_resume(config)
        with pytest.raises(CheckpointError, match=wrong), build_sft(config):
            pass
    check_resume(sft_config(runs / "copy", runs / "sft"))
    allowed = sft_config(runs / "other", runs / "sft", "trainer.resume_other_model=true")
    with build_sft(allowed) as trainer:
        assert trainer.state.step == 1
    with pytest.raises(CheckpointError, match="belongs to a run of kind sft, this one is of kind ppo"):
        check_resume(ppo_config(runs / "model", runs / "sft", *GRPO))


def test_the_command_says_so_before_torch_is_imported(runs: Path) -> None:
    words = ["--recipe=tiny/grpo", f"{MODEL}.path={runs}/other", f"trainer.default_local_dir={runs}/plain"]
    code = (
        "import sys\nfrom hybridflow.cli.main import main\n"
        f"print(main(['train', *{words!r}]), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
    assert "global_step_1 was made with another model than this run has" in done.stderr, done.stderr


def test_one_changed_number_of_the_weights_is_another_model(tmp_path: Path) -> None:
    def path_of(model: Path) -> Any:
        return model_facts(sft_config(model, tmp_path / "run"))["model.path"]

    model = tiny_model(tmp_path / "model")
    before = path_of(model)
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps({**settings, "transformers_version": "0", "_name_or_path": "x"})
    )
    assert path_of(model) == before
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    assert path_of(model) != before and path_of(model).startswith("llama ")
    named = sft_config(
        tmp_path / "model", tmp_path / "run", "model.path=org/name", "data.tokenizer=org/words"
    )
    assert model_facts(named) | {"model.override_config": 0} == {
        "model.path": "org/name",
        "model.override_config": 0,
        "model.lora_rank": 0,
        "data.tokenizer": "org/words",
    }
