"""verl's documented interactions and YAML run as they are, but for the name of the module."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hybridflow.environments import Step
from hybridflow.environments.load import load_environment
from hybridflow.errors import ConfigError, DataError
from hybridflow.interactions import InteractionEnvironment, load_interactions
from hybridflow.processes.errors import CallRaised
from hybridflow.processes.hosts import Hosts
from hybridflow.processes.local import HostsLike, LocalHosts

DOCUMENTED = """
interaction:
  - name: "gsm8k"
    class_name: "hybridflow.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
  - name: "custom_solver"
    class_name: "FILE:CountingInteraction"
    config:
      solver_type: "advanced"
      timeout: 30
  - name: "code_verifier"
    class_name: "hybridflow.interactions.base.BaseInteraction"
    config:
      verification_mode: "strict"
  - class_name: "hybridflow.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""
MINE = '''
from hybridflow.interactions.base import BaseInteraction


class CountingInteraction(BaseInteraction):
    """Ends at the third turn; scores by the number of messages that it has seen."""

    def __init__(self, config):
        super().__init__(config)
        self._open = {}

    async def start_interaction(self, instance_id=None, goal=None, **kwargs):
        instance_id = instance_id or f"run{len(self._open)}"
        self._open[instance_id] = goal
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        turns = [each["content"] for each in messages if each["role"] == "assistant"]
        return len(turns) == 3, f"{self._open[instance_id]} {turns[-1]}", 0.5, {"attempts": len(turns)}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self._open[instance_id]
'''


@pytest.fixture
def config_path(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    text = DOCUMENTED.replace("FILE", str(tmp_path / "mine.py")).rpartition("  - class_name")[0]
    (tmp_path / "interaction.yaml").write_text(text)
    return str(tmp_path / "interaction.yaml")


def row(**kwargs: Any) -> dict[str, Any]:
    return {
        "raw_prompt": [{"role": "user", "content": "What is 2+2?"}],
        "extra_info": {"interaction_kwargs": kwargs},
    }


def play(environment: InteractionEnvironment, asked: dict[str, Any], *answers: str) -> list[Step]:
    async def run() -> list[Step]:
        assert await environment.reset(asked) == asked["raw_prompt"]
        steps = [await environment.step(answer) for answer in answers]
        await environment.close()
        await environment.close()
        return steps

    return asyncio.run(run())


@pytest.mark.parametrize(
    "kwargs", [{"name": "gsm8k", "query": "2+2", "ground_truth": "4"}, {"ground_truth": "4"}]
)
def test_gsm8k_goes_on_until_the_answer_is_right(config_path: str, kwargs: dict[str, str]) -> None:
    environment = InteractionEnvironment(config_path)
    wrong, right = play(environment, row(**kwargs), "It is 5", "#### 4")
    assert wrong.reward == 0.0 and not wrong.done and "incorrect" in str(wrong.observation)
    assert right.reward == 1.0 and right.done and "is correct" in str(right.observation)


def test_a_row_chooses_its_interaction_and_trajectories_are_apart(config_path: str) -> None:
    first, second = (InteractionEnvironment(config_path) for _ in range(2))

    async def run() -> list[Step]:
        await first.reset(row(name="custom_solver", goal="one"))
        await second.reset(row(name="custom_solver", goal="two"))
        steps = [await first.step("a"), await second.step("b"), await first.step("c"), await first.step("d")]
        await first.close()
        return steps

    steps = asyncio.run(run())
    assert first.interaction.config == {"solver_type": "advanced", "timeout": 30, "name": "custom_solver"}
    assert not first.interaction._open and second.interaction._open  # type: ignore[attr-defined]
    assert [step.observation for step in steps] == ["one a", "two b", "one c", "one d"]
    assert [step.done for step in steps] == [False, False, False, True]
    assert steps[-1].extra == {"attempts": 3} and sum(step.reward for step in steps) == 2.0


def test_the_environment_is_named_like_every_other(config_path: str) -> None:
    spec = "hybridflow.interactions.environment:InteractionEnvironment"
    environment = load_environment(spec, {"config_path": config_path})()
    assert isinstance(environment, InteractionEnvironment)


def test_an_unknown_name_in_a_row_lists_the_known_ones(config_path: str) -> None:
    environment = InteractionEnvironment(config_path)
    with pytest.raises(DataError, match="got 'solver', wanted one of gsm8k, custom_solver, code_verifier"):
        asyncio.run(environment.reset(row(name="solver")))  # type: ignore[arg-type]
    asyncio.run(environment.close())  # type: ignore[arg-type]


def test_a_row_that_is_wrong_is_an_error_of_the_data_wherever_the_environment_runs(config_path: str) -> None:
    async def reset(hosts: HostsLike) -> None:
        environment = InteractionEnvironment(config_path)
        hosted = await hosts.create("copy:copy", environment, deadline_s=300.0)
        await hosted.call("reset", row(name="solver"), deadline_s=300.0)

    hosts = Hosts(1)
    try:
        for each in (LocalHosts(), hosts):
            with pytest.raises(CallRaised, match="got 'solver'") as caught:
                asyncio.run(reset(each))
            assert caught.value.cause == "data"
    finally:
        hosts.close()


def test_without_a_name_the_class_gives_it(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("interaction:\n" + DOCUMENTED[DOCUMENTED.rindex("  - class_name") :])
    assert list(load_interactions(str(tmp_path / "one.yaml"))) == ["gsm8k"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "has no list `interaction`"),
        ("interaction: {", "cannot be read"),
        (
            "interaction: [{class_name: verl.interactions.gone.GoneInteraction}]",
            "nothing here takes its place",
        ),
        ("interaction: [{class_name: hybridflow.nowhere.Base}]", "no module named 'hybridflow.nowhere'"),
        (
            "interaction: [{class_name: pathlib.Path}]",
            "Path has no method start_interaction",
        ),
        (DOCUMENTED.replace("FILE", "mine.py").replace("custom_solver", "gsm8k"), "two interactions.*gsm8k"),
    ],
)
def test_a_mistake_in_the_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("interaction.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_interactions("interaction.yaml")
    with pytest.raises(ConfigError, match=r"no file missing\.yaml"):
        load_interactions("missing.yaml")
