"""What a run needs and this environment lacks is said in one round with what is wrong with the keys."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hybridflow.cli.main import main
from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.distributed import accelerators
from hybridflow.errors import ConfigError
from hybridflow.trainer.main import missing_here, missing_libraries

KEYS = [
    "data.task.name=arithmetic_chain",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.name=vllm",
    "trainer.logger=[console,wandb,mlflow]",
    "trainer.device=cpu",
]
LACKING = ("needs vllm, which is not installed", "wandb is not installed", "mlflow is not installed")


@pytest.fixture(autouse=True)
def nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridflow.rollout.installed.find_spec", lambda name: None)
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)


def problem(*overrides: str, root: type = PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        prepare_config(root, overrides, missing=missing_here)
    return str(error.value)


def test_libraries_come_with_the_problems_of_several_keys() -> None:
    said = problem(*KEYS, "actor_rollout_ref.model.path=/nowhere", "actor_rollout_ref.rollout.n=1")
    for words in (*LACKING, "there is no folder /nowhere", "actor_rollout_ref.rollout.n=1"):
        assert said.count(words) == 1, said


def test_libraries_and_names_come_with_wrong_keys() -> None:
    said = problem(*KEYS, "data.train_batchsize=4", "trainer.nnodes=x", "algorithm.adv_estimator=grop")
    for words in (*LACKING, "data.train_batchsize", "trainer.nnodes", "algorithm.adv_estimator=grop"):
        assert words in said, said
    assert "actor_rollout_ref.model.path is not set" in said, "what follows from no wrong key is told too"


def test_too_many_processes_come_with_the_other_problems() -> None:
    said = problem(*KEYS, "actor_rollout_ref.model.path=/nowhere", "trainer.n_gpus_per_node=4096")
    for words in (*LACKING, "there is no folder /nowhere", "asks for 4096 processes"):
        assert words in said, said


LIGER = "actor_rollout_ref.model.use_liger=true"


@pytest.mark.parametrize(
    ("devices", "keys", "says"),
    [
        (
            ("no-such-file",),
            [LIGER, "trainer.device=auto"],
            "use_liger=true, and this machine shows no GPU",
        ),
        (
            ("no-such-file",),
            ["trainer.device=cuda"],
            "no such device is usable here (this machine",
        ),
        (("null",), [LIGER, "trainer.device=auto"], "torch 2.9+cpu is built for CPUs"),
        (("null",), ["trainer.device=cuda", "trainer.n_gpus_per_node=2"], "torch 2.9+cpu is built for CPUs"),
    ],
)
def test_a_device_that_is_not_there_is_missed_without_torch(
    devices: tuple[str, ...],
    keys: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "version.py").write_text(
        "__version__ = '2.9+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"
    )
    torch = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(accelerators, "find_spec", {"torch": torch}.get)
    monkeypatch.setattr(accelerators, "DEVICE_FILES", devices)
    model = ["actor_rollout_ref.model.path=a/b", *KEYS]
    assert says in problem(*model, *keys)
    elsewhere = "ray_kwargs.ray_init.address=auto"
    assert says not in problem(*model, *keys, "trainer.controller=ray", elsewhere)
    (tmp_path / "version.py").write_text("__version__ = '2.9'\ncuda: Optional[str] = '13.0'\n")
    assert "built for CPUs" not in problem(*model, *keys)


def test_a_supervised_run_has_trackers_too() -> None:
    said = problem("trainer.logger=[console,wandb]", "data.train_batchsize=4", root=SFTConfig)
    assert "wandb is not installed" in said and "data.train_batchsize" in said


def test_a_run_that_is_only_shown_gets_notes() -> None:
    loaded = prepare_config(
        PPOConfig, [*KEYS, "actor_rollout_ref.model.path=a/b"], runs=False, missing=missing_libraries
    )
    for words in LACKING:
        assert sum(words in note for note in loaded.notes) == 1, loaded.notes


def test_explain_prints_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--explain", "actor_rollout_ref.model.path=a/b", *KEYS]) == 0
    said = capsys.readouterr().err
    assert all(words in said for words in LACKING), said
