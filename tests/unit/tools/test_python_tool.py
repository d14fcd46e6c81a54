"""The model's Python programs: what they print comes back, and how they ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hybridflow.errors import ConfigError
from hybridflow.tools.python_tool import PythonTool

pytestmark = pytest.mark.xdist_group("sandbox")


@pytest.fixture(scope="module")
def tool() -> Iterator[PythonTool]:
    try:
        tool = PythonTool({"memory_limit_mb": 256, "num_workers": 1}, None)
    except ConfigError as error:
        pytest.skip(f"layers are missing here: {error}")
    yield tool
    tool.close()


def run(tool: PythonTool, code: str) -> str:
    response, _, _ = asyncio.run(tool.execute("", {"code": code}))
    return str(response.text)


def test_it_answers_with_output_and_errors(tool: PythonTool) -> None:
    assert run(tool, "import sys\nprint('é', file=sys.stderr)\nprint(6 * 7)") == "42\né\n"
    text = run(tool, "def half(x):\n    return x / 0\nhalf(1)")
    assert "main.py" in text and "line 2, in half" in text and "ZeroDivisionError" in text
    assert run(tool, "pass") == ""


def test_it_says_how_a_program_was_ended(tool: PythonTool) -> None:
    assert run(tool, "import os\nos.kill(os.getpid(), 9)") == "[the program was ended by SIGKILL]"
    text = run(tool, "print('begun', flush=True)\nx = [b'1' * (1 << 20) for _ in range(10000)]")
    assert text.startswith("begun\n") and text.endswith("[the program used more memory than it may]")


def test_each_program_begins_with_nothing(tool: PythonTool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    show = "import os\nprint(os.listdir(), os.environ.get('WANDB_API_KEY'))\nopen('left', 'w').write('x')"
    assert run(tool, show) == run(tool, show) == "['main.py'] None\n"


def test_a_config_of_the_time_without_a_sandbox_is_refused() -> None:
    with pytest.raises(ConfigError, match="Leave it out"):
        PythonTool({"allow_unsafe": True}, None)
