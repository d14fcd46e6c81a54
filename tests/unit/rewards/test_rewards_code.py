"""The reward for code: programs in the sandbox of this machine, and by a SandboxFusion service."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config.reward import RewardConfig, SandboxConfig, SandboxFusionConfig
from hybridflow.errors import ConfigError
from hybridflow.rewards import ScoreRequest, ScoringOutcome
from hybridflow.rewards.apart.programs import Program
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.call import call, call_manager, load_manager
from hybridflow.rewards.compose import resolve
from hybridflow.rewards.run_programs import MAX_OUTPUT, RemoteRunner, verdict_of

PLUS = {"fn_name": "f", "inputs": ["1", "2", "-5"], "outputs": ["2", "3", "-4"]}
ECHO = {"inputs": ["a", "b"], "outputs": ["a", "b"]}


def scored(config: RewardConfig, *rows: tuple[str, Any]) -> list[ScoringOutcome]:
    """Score (program, test cases) in this process, by the function of their data source."""
    try:
        function = resolve(config, seed=0)
        function(data_source="taco", solution_str="", ground_truth=ECHO)
    except ConfigError as error:
        pytest.skip(f"no sandbox here: {error}")
    return [call(function, ScoreRequest("taco", f"```python\n{code}\n```", cases)) for code, cases in rows]


def test_programs_are_scored_in_the_sandbox() -> None:
    config = RewardConfig(timeout=60.0, sandbox=SandboxConfig(timeout=3.0))
    outcomes = scored(
        config,
        ("def f(x): return x + 1", PLUS),
        ("def f(x): return abs(x) + 1", json.dumps(PLUS)),
        ("print(input())", ECHO),
        ("print('a')", ECHO),
        ("while True: pass", ECHO),
        ("def f(x):\n    while x < 0: pass\n    return x + 1", PLUS),
        ("raise ValueError", ECHO),
        ("def f(x): return x + 1", ["assert f(1) == 2", "assert f(1) == 3"]),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 5); print(input())", ECHO),
        ("def f(x): return x + 1", ["assert abs(f(1) - 2) < 1e-3", "assert abs(f(1) - 3) < 1e-3"]),
        ("raise ValueError", ["assert abs(f(1) - 2) < 1e-3"]),
        ("print(1)", {"inputs": ["1"]}),
    )
    assert [round(outcome.score, 3) for outcome in outcomes] == [
        *[1, 0.667, 1, 0.5, 0, 0.667, 0, 0.5, 0],
        *[0.5, 0, 0],
    ]
    verdicts = ["passed", "wrong", "passed", "wrong", "timed_out", "timed_out", "raised", "wrong", "raised"]
    verdicts += ["wrong", "raised"]
    assert [outcome.extras.get("verdict") for outcome in outcomes[:-1]] == verdicts
    assert outcomes[0].extras == {"acc": 1.0, "fenced": 1.0, "verdict": "passed"}
    assert outcomes[-1].error == "RewardError"


KINDS = """
import collections, enum, numpy
Point = collections.namedtuple("Point", "x y")
class Word(str, enum.Enum):
    A = "a"
def f(kind):
    print("not a whole line", end="", flush=True)
    return {
        "counter": collections.Counter("aab"),
        "nested": [collections.defaultdict(int, {numpy.int64(1): Point(True, numpy.float32(0.5))})],
        "ordered": collections.OrderedDict(a=numpy.bool_(True)),
        "word": Word.A,
        "frozen": frozenset([2]),
        "other": object(),
    }[kind]
"""


def test_values_that_equal_those_of_built_in_types_pass() -> None:
    asserts = [
        "assert f('counter') == {'a': 2, 'b': 1}",
        "assert f('nested') == [{1: (True, 0.5)}]",
        "assert f('ordered') == {'a': True}",
        "assert f('word') == 'a'",
        "assert f('frozen') == {2}",
    ]
    config = RewardConfig(timeout=60.0)
    right, wrong = scored(config, (KINDS, asserts), (KINDS, ["assert f('other') == 1", asserts[0]]))
    assert (right.score, wrong.score) == (1.0, 0.5)


def test_all_pass_or_nothing_and_as_a_term() -> None:
    config = RewardConfig(timeout=60.0, terms=[{"name": "code", "weight": 2, "continuous": False}])
    outcomes = scored(config, ("print('a')", ECHO), ("print(input())", ECHO))
    assert [outcome.score for outcome in outcomes] == [0.0, 2.0]


class _Service(http.server.BaseHTTPRequestHandler):
    """Runs programs as SandboxFusion's /run_code does, without any protection."""

    num_busy = 0

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if request["code"] == "BUSY":
            _Service.num_busy += 1
            self.send_error(503)
            return
        assert request["language"] == "python" and request["memory_limit_MB"] == 512
        done = subprocess.run(
            [sys.executable, "-I", "-c", request["code"]],
            input=request["stdin"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout}
        answer = json.dumps({"status": "Success", "run_result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/run_code"
    server.shutdown()
    server.server_close()


def test_a_service_runs_the_programs_where_it_is_asked_for(service: str) -> None:
    fusion = SandboxFusionConfig(service, memory_limit_mb=512)
    outcomes = scored(
        RewardConfig(timeout=600.0, sandbox_fusion=fusion),
        ("def f(x): return x + 1", PLUS),
        ("print(input())", ECHO),
        ("print('a')", ECHO),
        ("raise ValueError", ECHO),
    )
    assert [outcome.score for outcome in outcomes] == [1.0, 1.0, 0.5, 0.0]
    assert outcomes[-1].extras["verdict"] == "raised"


LOOK = """
import ctypes, os
def f():
    tests = os.getppid()
    reached = []
    for name in ("mem", "environ", "maps", "fd/0", "fd/1", "root", "cwd"):
        try:
            os.close(os.open(f"/proc/{tests}/{name}", os.O_RDONLY))
            reached.append(name)
        except OSError:
            pass
    libc = ctypes.CDLL(None)
    seize = 0x4206
    if libc.ptrace(seize, tests, 0, 0) == 0:
        reached.append("ptrace")
    buffer = ctypes.create_string_buffer(64)
    part = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 64)
    if libc.process_vm_readv(tests, part, 1, part, 1, 0) > 0:
        reached.append("memory")
    return reached + [number for number in range(4, 64) if os.path.exists(f"/proc/self/fd/{number}")][2:]
"""


def test_a_solution_cannot_look_into_the_tests_of_a_service(service: str) -> None:
    fusion = SandboxFusionConfig(service, memory_limit_mb=512)
    config = RewardConfig(timeout=600.0, sandbox_fusion=fusion)
    (outcome,) = scored(config, (LOOK, ["reached = f()", "assert reached == [], reached"]))
    assert outcome.score == 1.0


SLOW = """
import asyncio
under_way = 0
async def together(data_source, solution_str, ground_truth, extra_info):
    global under_way
    under_way += 1
    found = under_way
    for _ in range(20):
        await asyncio.sleep(0)
        found = max(found, under_way)
    under_way -= 1
    return found

class Manager:
    def __init__(self, compute_score):
        self.compute_score = compute_score
    async def __call__(self, rows):
        return [self.compute_score(**row) for row in rows]
"""


def test_programs_beside_an_async_term_and_in_an_async_manager(service: str, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    fusion = SandboxFusionConfig(service, memory_limit_mb=512)
    terms = [{"name": "code"}, {"name": f"{tmp_path}/slow.py:together"}]
    joined = RewardConfig(num_workers=1, timeout=600.0, sandbox_fusion=fusion, terms=terms)
    rows = [ScoreRequest("taco", "print(input())", {"inputs": ["a"], "outputs": ["a"]})] * 2
    with build_reward_manager(joined, 0) as manager:
        outcomes = manager.outcomes(rows)
    # each row has the worker to itself, so programs take no time of another's
    assert [(one.error, one.score, one.extras.get("together")) for one in outcomes] == [("", 2.0, 1.0)] * 2
    managed = RewardConfig(sandbox_fusion=fusion, function="code", manager=f"{tmp_path}/slow.py:Manager")
    function = resolve(managed, 0)
    whole = load_manager(managed, function)
    assert whole and [one.score for one in call_manager(whole, function, rows)] == [1.0] * 2


def test_all_tries_of_a_busy_service_fit_into_the_time_of_a_response(service: str) -> None:
    _Service.num_busy = 0
    busy = Program("BUSY", "", 1, lambda output: [True])
    runner = RemoteRunner(SandboxFusionConfig(service), seconds=10.0, budget_s=0.7, num_parallel=1)
    assert [ran.status for ran in runner.run([busy, busy])] == ["lost", "timed_out"]
    assert _Service.num_busy <= 2  # the third try would come after 1.5 s


def test_what_a_service_says_of_a_program() -> None:
    def ran(**result: Any) -> str:
        return verdict_of({"status": "Failed", "run_result": result}).status

    assert ran(status="TimeLimitExceeded") == "timed_out"
    assert ran(status="Finished", return_code=1) == "raised"
    assert ran(status="Error") == "raised"
    assert verdict_of({"status": "SandboxError", "message": "full"}).status == "lost"
    long = verdict_of(
        {"run_result": {"status": "Finished", "return_code": 0, "stdout": "x" * (MAX_OUTPUT + 1)}}
    )
    assert (long.status, len(long.stdout)) == ("ok", MAX_OUTPUT)
