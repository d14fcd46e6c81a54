from __future__ import annotations

import re
import sys
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from hybridflow.config.trainer import TRACKER_LIBRARIES, TrainerConfig
from hybridflow.errors import ConfigError
from hybridflow.observability.trackers import TRACKERS, libraries
from hybridflow.observability.trackers.build import IN_PROCESS, check_trackers

ROOT = Path(__file__).parents[3]
KEYS = [
    "WANDB_API_KEY",
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_MODE",
    "WANDB_BASE_URL",
    "NETRC",
    "SWANLAB_API_KEY",
    "SWANLAB_MODE",
    "SWANLAB_ROOT",
    "SWANLAB_SAVE_DIR",
    "CLEARML_CONFIG_FILE",
    "CLEARML_API_ACCESS_KEY",
    "CLEARML_AUTH_TOKEN",
]


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in KEYS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def install(name: str, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(libraries, "version", lambda _: version)


def test_every_library_has_an_extra_of_its_version_and_a_row_of_the_page() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "trackers.md").read_text()
    assert set(TRACKER_LIBRARIES) == set(TRACKERS) - set(IN_PROCESS)
    for name, version in TRACKER_LIBRARIES.items():
        assert extras[name] == [f"{name}>={version}"]
        assert re.search(rf"^\| `{name}` \|.* {re.escape(version)} \|", page, re.MULTILINE), name


@pytest.mark.parametrize("name", TRACKER_LIBRARIES)
def test_a_library_that_is_too_old_is_refused_with_both_versions(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(name, monkeypatch, "0.0.3")
    with pytest.raises(
        ConfigError, match=rf"{name} 0\.0\.3 is installed, which is older than {TRACKER_LIBRARIES[name]}"
    ):
        check_trackers(TrainerConfig(logger=[name]))


@pytest.mark.parametrize("name", ["trackio", "clearml", "weave"])
def test_a_missing_library_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"install the extra '{name}'"):
        check_trackers(TrainerConfig(logger=[name]))


@pytest.mark.parametrize(("name", "mode"), [("wandb", "online"), ("swanlab", "cloud")])
def test_online_without_a_key_is_refused_and_offline_is_not(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(name, monkeypatch, "99")
    check_trackers(TrainerConfig(logger=[name]))
    monkeypatch.setenv(f"{name.upper()}_MODE", mode)
    with pytest.raises(ConfigError, match=f"MODE is {mode}, .* set {name.upper()}_API_KEY, run `{name}"):
        check_trackers(TrainerConfig(logger=[name]))
    Path(".swanlab").mkdir()
    Path(".swanlab/.netrc").write_text("machine api.swanlab.cn login x password k")
    monkeypatch.setenv("WANDB_API_KEY", "k")
    check_trackers(TrainerConfig(logger=[name]))


def test_weave_always_wants_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install("weave", monkeypatch, "99")
    with pytest.raises(ConfigError, match="no offline mode"):
        check_trackers(TrainerConfig(logger=["weave"]))
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k")
    check_trackers(TrainerConfig(logger=["weave"]))


def test_a_key_of_another_server_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k")
    assert libraries.wandb_key_is_set()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example")
    assert not libraries.wandb_key_is_set()


def test_clearmls_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not libraries.clearml_key_is_set()
    (tmp_path / "clearml.conf").write_text("api {}")
    assert libraries.clearml_key_is_set()
    monkeypatch.setenv("CLEARML_CONFIG_FILE", "elsewhere.conf")
    assert not libraries.clearml_key_is_set()
