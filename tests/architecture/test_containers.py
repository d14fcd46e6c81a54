"""The container files: what they copy is there, and their commands are ones that hybridflow has."""

from __future__ import annotations

import json
import re
import shlex
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from sources import ROOT

from hybridflow.cli.main import parser
from hybridflow.config import PPOConfig
from hybridflow.config.load import load_config
from hybridflow.controller.ray.session import HEALTH_CHECKS

FOLDER = ROOT / "docker"
DOCKERFILES = sorted(FOLDER.glob("Dockerfile.*"))
COMPOSE = sorted(FOLDER.glob("*.yaml"))
INSTRUCTIONS = {"FROM", "WORKDIR", "COPY", "RUN", "ARG", "ENV", "USER", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their words; comments are left out and lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2]) for line in joined.splitlines() if line.strip()]


def check_command(words: list[str]) -> None:
    """Fail where these are the words of `hybridflow` and its grammar does not take them."""
    if words and words[0] == "hybridflow":
        options, rest = parser().parse_known_args(words[1:])
        assert not [word for word in rest if word.startswith("-")], words
        if options.command == "train":
            load_config(PPOConfig, options.overrides, options.recipe)


def ignored(path: str) -> bool:
    """Whether .dockerignore keeps a path out; the last line that fits it counts."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.lstrip("!").removeprefix("**/")
        if line.startswith("#") or not line:
            continue
        if fnmatch(path.partition("/")[0], pattern) or fnmatch(path, pattern):
            out = not line.startswith("!")
    return out


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(path: Path) -> None:
    given = instructions(path)
    assert {name for name, _ in given} <= INSTRUCTIONS and given[0][0] == "FROM"
    stages = [words.split()[2] for name, words in given if name == "FROM" and " AS " in words]
    copied = []
    for name, words in given:
        if name != "COPY":
            continue
        first, *paths = words.split()
        if first.startswith("--from="):
            assert first.removeprefix("--from=") in stages
            continue
        copied += [first, *paths][:-1]
    assert copied and all((ROOT / source).exists() for source in copied)
    assert not [source for source in copied if ignored(source)], "not in the build's context"
    (command,) = [json.loads(words) for name, words in given if name == "CMD"]
    check_command(command)
    torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert torch is not None and torch[0] in path.read_text()


def test_the_context_has_what_the_wheel_is_built_from() -> None:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src/hybridflow/recipes/grpo.yaml"):
        assert not ignored(name)
    for name in (".git", ".venv", "tests", "checkpoints", "demo"):
        assert ignored(name)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_files(path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    services = content["services"]
    for service in services.values():
        if "build" in service:
            context = (path.parent / service["build"]["context"]).resolve()
            assert (context / service["build"]["dockerfile"]).is_file()
        check_command(service.get("command", []))
        assert all(each in services for each in service.get("depends_on", {}))
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("./"):
                assert (path.parent / source).is_dir()
            else:
                assert source in content["volumes"]


def test_the_cluster_of_compose_has_the_clocks_and_the_token_of_the_launch_scripts() -> None:
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    for name in ("head", "worker"):
        environment = services[name]["environment"]
        assert {
            f"RAY_{key}": str(value) for key, value in HEALTH_CHECKS.items()
        }.items() <= environment.items()
        assert environment["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" in environment
    over = yaml.safe_load((FOLDER / "compose.cuda.yaml").read_text())["services"]
    assert set(over) == set(services)


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_no_service_waits_for_a_variable_of_another(path: Path) -> None:
    """A compose file is filled in as a whole, whatever service is started."""
    assert not re.findall(r"\$\{\w+:?\?.*?\}", path.read_text())


def test_commands_of_the_page() -> None:
    page = (ROOT / "docs" / "docker.md").read_text()
    found = 0
    for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line)
            if "hybridflow" in words[2:] and words[0] == "docker" and {"run", "exec"} & set(words):
                last = len(words) - 1 - words[::-1].index("hybridflow")
                check_command(words[last:])
                trains = words[last + 1] == "train"
                assert not trains or any(word.startswith("actor_rollout_ref.model.path=") for word in words)
                found += 1
    assert found == 4
    assert "No image was built and no container run" in page
