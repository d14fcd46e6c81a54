"""A user's files that import verl, where verl is not installed."""

from __future__ import annotations

import logging
import pickle
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from hybridflow.data.plugin import load_object
from hybridflow.data.verl_names import HOMES, VerlNames, home_of
from hybridflow.errors import ConfigError
from hybridflow.protocol import DataProto
from hybridflow.tools.base_tool import BaseTool

pytestmark = pytest.mark.skipif(
    PathFinder.find_spec("verl") is not None,
    reason="verl itself is installed here",
)


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    yield
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, VerlNames)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


def loaded(folder: Path, text: str, name: str) -> object:
    file = folder / "mine.py"
    file.write_text(text)
    return load_object(f"{file}:{name}", key="reward.custom_reward_function.path")


def test_classes_are_ours_and_a_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        found = loaded(
            tmp_path,
            "from verl import DataProto\nimport verl.tools.base_tool as base\n"
            "from verl.interactions.base import BaseInteraction\n"
            "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, register\n"
            "class Mine(base.BaseTool):\n    batch = DataProto\n",
            "Mine",
        )
    assert isinstance(found, type) and issubclass(found, BaseTool) and found.batch is DataProto  # type: ignore[attr-defined]
    assert (
        "hybridflow.tools.base_tool stands for verl.tools.base_tool, as verl is not installed" in caplog.text
    )
    assert sys.modules["hybridflow.tools.base_tool"].__name__ == "hybridflow.tools.base_tool"


def test_reward_functions_are_called_as_verls(tmp_path: Path) -> None:
    score = loaded(
        tmp_path,
        "from verl.utils.reward_score import default_compute_score, gsm8k, math_reward, math_dapo\n"
        "def score(text, truth):\n"
        "    return (gsm8k.compute_score(text, truth), math_reward.compute_score(text, truth),\n"
        "            math_dapo.compute_score(text, truth)['acc'],\n"
        "            default_compute_score('openai/gsm8k', text, truth, extra_info={}))\n",
        "score",
    )
    assert callable(score)
    assert score("#### 3\nAnswer: 3", "3") == (1.0, 0.0, 1.0, 1.0)
    assert score("#### 4\n\\boxed{3}", "3") == (0.0, 1.0, 0.0, 0.0)
    from verl.utils.reward_score import default_compute_score  # type: ignore[import-not-found]

    with pytest.raises(NotImplementedError, match="knows no reward for data_source 'elsewhere'"):
        default_compute_score("elsewhere", "a", "b")
    with pytest.raises(TypeError, match="sandbox_fusion_url is a key of the run here"):
        default_compute_score("math", "a", "b", sandbox_fusion_url="http://a", memory_limit_mb=None)
    from verl.utils.reward_score import gsm8k, math_reward

    assert gsm8k.compute_score("it is 3", "3", "flexible", score=5.0) == 5.0
    assert gsm8k.compute_score("#### 4", "3", format_score=0.5) == 0.5
    with pytest.raises(TypeError, match="has no option method"):
        math_reward.compute_score("3", "3", "flexible")
    for function in (default_compute_score, gsm8k.compute_score):  # as a pool of processes needs it
        assert pickle.loads(pickle.dumps(function)) is not None
    with pytest.raises(AttributeError, match=r"module 'verl.utils.reward_score.gsm8k' \(here hybridflow"):
        gsm8k.extract_solution  # noqa: B018


def test_what_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"verl\.utils\.fs: verl is not installed, and"):
        loaded(tmp_path, "from verl.utils.fs import copy_to_local\n", "copy_to_local")
    with pytest.raises(ConfigError, match=r"cannot import name 'Nothing' from 'verl\.tools"):
        loaded(tmp_path, "from verl.tools.base_tool import Nothing\n", "Nothing")


def test_every_module_of_the_table_is_there() -> None:
    assert [name for name in HOMES if home_of(name) is None] == []


def test_a_verl_that_is_installed_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / "__init__.py").write_text("DataProto = 'theirs'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert loaded(tmp_path, "from verl import DataProto\n", "DataProto") == "theirs"
    with pytest.raises(ConfigError, match=r"No module named 'verl\.tools'"):
        loaded(tmp_path, "import verl.tools\n", "verl")
