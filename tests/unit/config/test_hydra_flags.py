"""The flags of Hydra: a YAML file of one's own is read, the others end in one sentence."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from possible_run import write_model_folder

from hybridflow.cli.main import main as hybridflow
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.trainer.main_ppo import main as main_ppo
from hybridflow.trainer.main_sft import main as main_sft

FORMS = [
    ["--config-path={folder}", "--config-name=mine"],
    ["--config-path", "{folder}", "--config-name", "mine.yaml"],
    ["-cp", "{folder}", "-cn=mine"],
    ["--config-dir={folder}", "--config-name=mine"],
    ["--config-path=file://{folder}", "--run", "--config-name=mine"],
]


@pytest.mark.parametrize("form", FORMS, ids=" ".join)
def test_a_yaml_file_of_ones_own_is_a_recipe(form: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nhydra: {searchpath: [file://verl/trainer/config], run: {dir: "
        "out}}\ndata: {train_batch_size: 8, max_prompt_length: 7}\n"
    )
    words = [word.replace("{folder}", str(tmp_path)) for word in form]
    loaded = load_config(PPOConfig, ["data.max_prompt_length=9", *words, "trainer.seed=3"])
    assert loaded.config.data.train_batch_size == 8 and loaded.config.trainer.seed == 3
    # the command line counts over the file
    assert loaded.config.data.max_prompt_length == 9
    assert [note.partition(" has no effect")[0] for note in loaded.notes] == [
        "hydra.searchpath=['file://verl/trainer/config']",
        "hydra.run.dir=out",
    ]


def test_a_name_alone_is_a_recipe_and_verls_own_name_means_the_defaults() -> None:
    assert load_config(PPOConfig, ["--config-name=grpo"]) == load_config(PPOConfig, recipe="grpo")
    assert load_config(PPOConfig, ["--config-name", "ppo_trainer"]) == load_config(PPOConfig)
    assert load_config(SFTConfig, ["--config-name=sft_trainer_engine"]) == load_config(SFTConfig)


def test_verls_name_with_megatron_means_every_role(base: list[str]) -> None:
    name = "--config-name=ppo_megatron_trainer"
    read = load_config(PPOConfig, [name]).config
    assert read.actor_rollout_ref.actor.strategy == read.critic.strategy == "megatron"
    assert load_config(PPOConfig, ["critic.strategy=fsdp2", name]).config.critic.strategy == "fsdp2"
    grpo = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
    notes = prepare_config(PPOConfig, [*base, name, *grpo]).notes
    assert not any("critic" in note for note in notes), notes


WRONG = [
    (["--config-path={tmp}/none", "--config-name=mine"], "there is no folder"),
    (["--config-path={tmp}", "--config-name=mine"], "there is no file"),
    (["--config-path={tmp}/none", "--config-name=ppo_torchtitan_trainer.yaml"], "YAML files are not part of"),
    (["--config-path={tmp}", "--config-name=ppo_torchtitan_trainer"], "YAML files are not part of"),
    (["--config-name=ppo_torchtitan_trainer"], "YAML files are not part of"),
    (["--config-path={tmp}"], "without --config-name"),
    (["--config-name"], "--config-name without a name"),
    (["--config-name=ppo_torchtitan_trainer"], "no recipe is called ppo_torchtitan_trainer"),
    (["-m", "data.train_batch_size=1,2"], "hybridflow train --multirun"),
    (["--multirun"], "hybridflow train --multirun"),
    (["--cfg", "job"], "hybridflow config"),
    (["-c=job", "--resolve"], "hybridflow config"),
    (["--info"], "hybridflow config"),
    (["--hydra-help"], "hybridflow config"),
    (["--version"], "hybridflow --version"),
    (["--frobnicate"], "--frobnicate: there is no such option"),
    (["hydra.mode=MULTIRUN"], "hybridflow train --multirun"),
    (["hydra.launcher=submitit"], "not run by Hydra"),
    (["a b=1"], "a b=1: not an override"),
    (["+x@y:z=1"], "+x@y:z=1"),
]


@pytest.mark.parametrize(("words", "wanted"), WRONG, ids=lambda value: " ".join(value)[:40])
def test_other_flags_end_in_one_sentence(
    words: list[str], wanted: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main_ppo([word.replace("{tmp}", str(tmp_path)) for word in words]) == 1
    written = capfd.readouterr().err
    assert wanted in written and "Traceback" not in written and len(re.findall("Error:", written)) == 1


def test_hydras_run_folder_has_no_effect() -> None:
    loaded = load_config(PPOConfig, ["hydra.run.dir=out", "hydra.output_subdir=null"])
    assert loaded.config == PPOConfig() or not loaded.given
    assert all("trainer.default_local_dir" in note for note in loaded.notes) and len(loaded.notes) == 2


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_shown(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main_ppo([flag]) == 0 and main_sft([flag]) == 0
    shown = capfd.readouterr().out
    assert "--config-name" in shown and "hybridflow config --sft" in shown


@pytest.mark.parametrize("form", FORMS[:4], ids=" ".join)
@pytest.mark.parametrize("command", ["config", "train", "explain"])
def test_the_commands_take_the_same_options(
    command: str, form: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer]\nalgorithm: {adv_estimator: no_such}\n")
    words = [word.replace("{folder}", str(tmp_path)) for word in form]
    for given in ([*words, "data.seed=3"], ["data.seed=3", *words]):
        assert hybridflow([command, *given]) == 1
        assert "algorithm.adv_estimator=no_such: there are gae" in capfd.readouterr().err


def test_options_of_hydra_go_with_others_of_a_command(capfd: pytest.CaptureFixture[str]) -> None:
    run = ["data.task.name=arithmetic_chain", "actor_rollout_ref.model.path=a/b"]
    assert hybridflow(["config", "--config-name=grpo", *run, "--changed"]) == 0
    assert "adv_estimator: grpo" in capfd.readouterr().out
    assert hybridflow(["config", "--config-name", "grpo", "--recipe", "ppo"]) == 1
    assert "give one of them" in capfd.readouterr().err
    words = [
        "--config-path=config",
        "--config-name=ppo_megatron_trainer.yaml",
        "data.task.name=arithmetic_chain",
    ]
    assert hybridflow(["config", "--explain", *words, "actor_rollout_ref.model.path=a/b"]) == 0
    assert "strategy=megatron" in capfd.readouterr().err
    sweep = ["train", "-m", "--config-name=none", "data.seed=1,2"]
    assert hybridflow(sweep) == 1 and "no recipe is called none" in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["--cfg=job", "--hydra-help", "--package=a"])
def test_the_command_names_its_own_option(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        hybridflow(["train", flag])
    assert end.value.code == 2 and "--recipe PATH" in capfd.readouterr().err


@pytest.mark.parametrize("module", ["fsdp_sft_trainer", "sft_trainer", "main_sft"])
def test_verls_names_of_the_supervised_trainer_and_torchrun(
    module: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = importlib.import_module(f"hybridflow.trainer.{module}").main
    assert main(["data.train_filez=a"]) == 1 and "data.train_filez" in capfd.readouterr().err
    write_model_folder(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "response": "b"}')
    words = [
        f"model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/a.jsonl",
        "data.train_batch_size=1",
    ]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    assert main([*words, f"trainer.default_local_dir={tmp_path}/run"]) == 1
    said = capfd.readouterr().err
    assert "one of 8 processes" in said and "trainer.n_gpus_per_node=4 and trainer.nnodes=2" in said
