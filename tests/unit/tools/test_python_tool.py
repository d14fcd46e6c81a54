"""The model's Python programs: what they print comes back, and their limits hold."""

from __future__ import annotations

import asyncio
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import ConfigError
from hybridflow.processes import Hosts
from hybridflow.tools.python_tool import MAX_OUTPUT, PythonTool


def run(code: str, **config: Any) -> str:
    tool = pickle.loads(pickle.dumps(PythonTool({"allow_unsafe": True, **config}, None)))
    response, _, _ = asyncio.run(tool.execute("", {"code": code}))
    return str(response.text)


def test_it_answers_with_output_and_errors() -> None:
    assert run("import sys\nprint(6 * 7)\nprint('é', file=sys.stderr)") == "42\né\n"
    text = run("def half(x):\n    return x / 0\nhalf(1)")
    assert "program.py" in text and "line 2, in half" in text and "ZeroDivisionError" in text
    assert run("import os\nos.kill(os.getpid(), 9)") == "[the program was ended by SIGKILL]"
    assert run("pass") == ""


def test_each_program_begins_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    show = "import os\nprint(os.listdir(), os.environ.get('WANDB_API_KEY'))\nopen('left', 'w').write('x')"
    assert run(show) == run(show) == "['program.py'] None\n"


def ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_limits_hold(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, time\n"
        f"open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '600']).pid))\n"
        "print('begun')\n"
        "time.sleep(600)"
    )
    seconds = 1
    while "begun" not in (text := run(code, default_timeout=seconds)):  # the machine is slow
        seconds *= 2
    assert text == f"begun\n\n[the program took longer than {seconds} seconds]"
    deadline = time.monotonic() + 600
    while not ended(note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended(note.read_text())
    assert "MemoryError" in run("bytearray(1 << 32)", memory_limit_mb=512)
    assert len(run(f"print('x' * {4 * MAX_OUTPUT})")) == MAX_OUTPUT


def test_it_runs_in_a_worker_process() -> None:
    async def episode(hosts: Hosts) -> str:
        config = {"allow_unsafe": True}
        hosted = await hosts.create("hybridflow.tools.python_tool:PythonTool", config, None, deadline_s=600.0)
        response, _, _ = await hosted.call(
            "execute", "", {"code": "import os\nprint(os.getppid())"}, deadline_s=600.0
        )
        return str(response.text)

    hosts = Hosts(1)
    assert int(asyncio.run(episode(hosts))) != os.getpid()
    hosts.close()


@pytest.mark.parametrize("config", [{}, {"allow_unsafe": "yes"}])
def test_it_is_refused_unless_the_config_allows_it(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"with your rights on this machine.*allow_unsafe: true"):
        PythonTool(config, None)
