"""Objects in worker processes: their state travels or stays, calls that misbehave cost their own object."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from endings import gone, wait_until
from hybridflow.processes.errors import CallRaised, CallTooLong, ProcessLost
from hybridflow.processes.hosts import Hosted, Hosts

FILE = """
import asyncio, ctypes, os, socket, sys, tempfile, time

class Note:
    def __init__(self, text):
        self.text = text

class Counter:
    def __init__(self, start=0):
        self.value = start
        self.notes = []

    def add(self, number):
        self.value += number
        self.notes.append(Note(str(number)))
        return self.value

    async def add_later(self, number):
        await asyncio.sleep(0)
        return self.add(number)

    def raises(self):
        self.value += 100
        raise KeyError("no such key")

    def spoils_and_raises(self):
        self.socket = socket.socket()
        raise KeyError("after the socket")

    def returns_unpicklable(self):
        self.value += 1
        return lambda: 0

    def hangs(self, note=None):
        if note:
            open(note, "w").write(str(os.getpid()))
        time.sleep(3600)

    def exits(self):
        os._exit(3)

    def quits(self):
        sys.exit(4)

    def segfault(self):
        ctypes.string_at(0)

    def writes_everywhere(self):
        for number in range(3, 4096):
            try:
                os.write(number, b"progress: 10 %")
            except OSError:
                pass

    def makes(self, size):
        return bytes(size)

    def echo(self, data, pid=False):
        return (os.getpid(), data) if pid else data

    def threads(self):
        return os.environ["OMP_NUM_THREADS"], "torch" in sys.modules

class Engine(Counter):
    '''Does not pickle from its first call on, until its engine is off.'''

    def start(self):
        self.engine = socket.socket()
        return os.getpid()

    def stop(self):
        self.engine.close()
        del self.engine

class Workspace(Counter):
    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()

    def write(self):
        with open(self.folder.name + "/note", "a") as file:
            file.write("x")
        return self.folder.name, os.path.getsize(self.folder.name + "/note")

def broken():
    raise ValueError("not today")

def make(name, *args):
    return globals()[name](*args)
"""
LONG = 600.0


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("hosts") / "objects.py"
    path.write_text(FILE)
    return str(path)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    hosts = Hosts(2)
    yield hosts
    hosts.close()


async def counter(hosts: Hosts, file: str, *args: Any) -> Hosted:
    return await hosts.create(f"{file}:Counter", *args, deadline_s=LONG)


def children() -> set[int]:
    """The ids of this process's children; a thread that ends while they are read has none any more."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


def test_thousands_of_objects_share_two_workers(hosts: Hosts, file: str) -> None:
    async def one(number: int) -> tuple[int, int]:
        hosted = await counter(hosts, file, number)
        await hosted.call("add", 1, deadline_s=LONG)
        pid, _ = await hosted.call("echo", 0, pid=True, deadline_s=LONG)
        value = await hosted.call("add_later", 1, deadline_s=LONG)
        await hosted.close()
        return pid, value

    async def work() -> None:
        found = await asyncio.gather(*(one(number) for number in range(500)))
        assert [value for _, value in found] == [number + 2 for number in range(500)]
        assert len({pid for pid, _ in found}) == 2
        hosted = await counter(hosts, file)
        assert await hosted.call("threads", deadline_s=LONG) == ("1", False)

    before = dict(hosts.counts)
    asyncio.run(work())
    assert hosts.counts == before | {"calls": before["calls"] + 2002}


def test_each_misbehaving_call_costs_its_own_object(hosts: Hosts, file: str) -> None:
    async def good() -> int:
        hosted = await counter(hosts, file)
        for _ in range(20):
            value: int = await hosted.call("add", 1, deadline_s=LONG)
        return value

    async def bad(method: str, kind: type[Exception], text: str) -> int:
        hosted = await counter(hosts, file)
        await hosted.call("add", 5, deadline_s=LONG)
        deadline = LONG
        if kind is CallTooLong:
            deadline = 0.3
        with pytest.raises(kind, match=text):
            await hosted.call(method, deadline_s=deadline)
        value: int = await hosted.call("add", 1, deadline_s=LONG)
        return value

    async def work() -> None:
        calls = {
            bad("hangs", CallTooLong, "Counter: hangs ran past its deadline of 0.3"): 6,
            bad("exits", ProcessLost, "exits: its process ended with exit code 3"): 6,
            bad("segfault", ProcessLost, "was ended by SIGSEGV"): 6,
            bad("writes_everywhere", ProcessLost, "bytes of its own"): 6,
            bad("quits", CallRaised, "SystemExit: 4"): 6,
            bad("raises", CallRaised, "KeyError: 'no such key'"): 106,
            bad("spoils_and_raises", CallRaised, "after the socket"): 6,
            bad("returns_unpicklable", CallRaised, "pickle"): 7,
            bad("absent", CallRaised, "AttributeError.*absent"): 6,
        }
        found = await asyncio.gather(*calls, *(good() for _ in range(20)))
        assert found == [*calls.values(), *[20] * 20]

    before = dict(hosts.counts)
    asyncio.run(work())
    assert hosts.counts["kills"] == before["kills"] + 1
    assert hosts.counts["deaths"] == before["deaths"] + 3


PLAIN = """
import os
class Plain:
    turns = 0
    def reset(self, row):
        return "go on"
    def step(self, text):
        if text == "exit":
            os._exit(1)
        self.turns += 1
        return str(self.turns)
"""


def test_an_environment_of_any_class_goes_to_a_worker_that_has_not_seen_it(tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        factory = "hybridflow.environments.load:open_environment"
        hosted = await hosts.create(factory, f"{tmp_path}/plain.py:Plain", {}, 1, 2, deadline_s=LONG)
        assert await hosted.call("step", "", deadline_s=LONG) == "1"
        with pytest.raises(ProcessLost):
            await hosted.call("step", "exit", deadline_s=LONG)
        assert await hosted.call("step", "", deadline_s=LONG) == "2"
        assert await hosted.call("score", deadline_s=LONG) is None
        assert hosted.state is not None

    (tmp_path / "plain.py").write_text(PLAIN)
    hosts = Hosts(1)
    asyncio.run(work(hosts))
    hosts.close()


def test_an_error_has_the_traceback_of_its_process(hosts: Hosts, file: str) -> None:
    with pytest.raises(CallRaised) as raised:
        asyncio.run(hosts.create(f"{file}:broken", deadline_s=LONG))
    assert (raised.value.type_name, raised.value.message) == ("ValueError", "not today")
    assert "objects.py" in raised.value.traceback_text and "in broken" in raised.value.traceback_text
    with pytest.raises(CallRaised, match="has no name 'Absent'"):
        asyncio.run(hosts.create(f"{file}:Absent", deadline_s=LONG))
    with pytest.raises(CallRaised, match="pickle"):
        asyncio.run(hosts.create(f"{file}:Counter", lambda: 0, deadline_s=LONG))


def test_a_file_that_does_not_load_in_time_is_named(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(3600)\n")
    hosts = Hosts(1, start_timeout=0.5)
    with pytest.raises(CallTooLong, match=r"slow.py:Absent: create: its process was not ready within 0.5"):
        asyncio.run(hosts.create(f"{tmp_path}/slow.py:Absent", deadline_s=LONG))
    hosts.close()


def test_large_arguments_and_results_travel(hosts: Hosts, file: str) -> None:
    async def work() -> None:
        hosted = await counter(hosts, file)
        data = os.urandom(1 << 20) * 8
        assert await hosted.call("echo", data, deadline_s=LONG) == data

    asyncio.run(work())


def test_what_is_too_large_is_refused_and_the_object_goes_on(hosts: Hosts, file: str) -> None:
    async def work() -> None:
        hosted = await counter(hosts, file)
        with pytest.raises(CallRaised, match=r"bytes of 7\d{7} bytes: at most 67108864"):
            await hosted.call("makes", 70 << 20, deadline_s=LONG)
        assert await hosted.call("add", 2, deadline_s=LONG) == 2

    asyncio.run(work())


def test_calls_of_one_object_come_one_after_the_other(hosts: Hosts, file: str) -> None:
    async def work() -> None:
        hosted = await counter(hosts, file)
        found = await asyncio.gather(*(hosted.call("add", 1, deadline_s=LONG) for _ in range(20)))
        assert found == list(range(1, 21))

    asyncio.run(work())


def test_an_object_that_does_not_pickle_stays_in_a_worker_of_its_own(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def one(hosts: Hosts) -> tuple[int, int]:
        hosted = await hosts.create(f"{file}:make", "Engine", deadline_s=LONG)
        home = await hosted.call("start", deadline_s=LONG)
        for _ in range(5):
            with contextlib.suppress(CallRaised):
                await hosted.call("raises", deadline_s=LONG)
            pid, _ = await hosted.call("echo", 0, pid=True, deadline_s=LONG)
            assert pid == home
            other = await hosts.create(f"{file}:make", "Counter", deadline_s=LONG)
            assert await other.call("add", 1, deadline_s=LONG) == 1
        value = await hosted.call("add", 1, deadline_s=LONG)
        await hosted.close()
        with pytest.raises(ProcessLost, match="it was closed"):
            await hosted.call("add", 1, deadline_s=LONG)
        return home, value

    async def work(hosts: Hosts) -> None:
        found = await asyncio.gather(*(one(hosts) for _ in range(8)))
        assert {value for _, value in found} == {501}
        # two that may stay, and those under way when the first did
        assert 1 <= len({home for home, _ in found}) <= 6

    hosts = Hosts(2, max_kept=2)
    asyncio.run(work(hosts))
    hosts.close()
    (line,) = [record.getMessage() for record in caplog.records if "do not pickle" in record.getMessage()]
    assert "make Engine" in line and "socket" in line


def test_tasks_with_two_objects_that_stay_do_not_wait_for_each_other(file: str) -> None:
    async def one(hosts: Hosts) -> int:
        engines = []
        for _ in range(2):
            engine = await hosts.create(f"{file}:Engine", deadline_s=LONG)
            await engine.call("start", deadline_s=LONG)
            engines.append(engine)
        assert hosts.waiting <= 3
        values = [await engine.call("add", 1, deadline_s=LONG) for engine in engines]
        for engine in engines:
            await engine.close()
        return sum(values)

    async def work(hosts: Hosts) -> None:
        first = await hosts.create(f"{file}:Engine", deadline_s=LONG)
        await first.call("start", deadline_s=LONG)  # from here it is known that they stay
        tasks = [asyncio.create_task(one(hosts)) for _ in range(4)]
        await asyncio.sleep(0)
        assert hosts.waiting == 4
        await first.close()
        assert len({await task for task in tasks}) == 1 and hosts.waiting == 0

    hosts = Hosts(2, max_kept=1, wait_timeout=LONG)
    asyncio.run(work(hosts))
    hosts.close()


def test_an_object_that_stays_may_go_on_its_way_again_or_die(file: str) -> None:
    async def work(hosts: Hosts) -> None:
        hosted = await hosts.create(f"{file}:Engine", 7, deadline_s=LONG)
        await hosted.call("start", deadline_s=LONG)
        assert hosted.state is None
        await hosted.call("stop", deadline_s=LONG)
        assert hosted.state is not None
        await hosted.call("start", deadline_s=LONG)
        with pytest.raises(CallTooLong, match=r"no free process within .* seconds; .* of 1 tasks"):
            await asyncio.create_task(hosts.create(f"{file}:Engine", deadline_s=LONG))
        with pytest.raises(ProcessLost, match="exit code 3"):
            await hosted.call("exits", deadline_s=LONG)
        with pytest.raises(ProcessLost, match="its process has ended"):
            await hosted.call("add", 1, deadline_s=LONG)
        await hosted.close()

    hosts = Hosts(1, max_kept=1, wait_timeout=0.2)
    asyncio.run(work(hosts))
    hosts.close()


def test_what_ends_with_an_object_does_not_travel(file: str) -> None:
    async def work(hosts: Hosts) -> str:
        hosted = await hosts.create(f"{file}:Workspace", deadline_s=LONG)
        for number in range(1, 4):
            folder, size = await hosted.call("write", deadline_s=LONG)
            assert size == number
        await hosted.close()
        return str(folder)

    hosts = Hosts(1)
    folder = asyncio.run(work(hosts))
    assert not Path(folder).exists()
    hosts.close()


def test_a_call_that_is_cancelled_leaves_the_queue_or_its_worker(file: str, tmp_path: Path) -> None:
    async def work(hosts: Hosts) -> None:
        hosted = await counter(hosts, file)
        note = tmp_path / "pid"
        runs = asyncio.create_task(hosted.call("hangs", str(note), deadline_s=LONG))
        while not note.exists() or not note.read_text():
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(counter(hosts, file)) for _ in range(5)]
        await asyncio.sleep(0)
        others[0].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await others[0]
        assert hosts.counts["kills"] == 0
        runs.cancel()
        with pytest.raises(asyncio.CancelledError):
            await runs
        assert hosts.counts["kills"] == 1
        for other in others[1:]:
            assert await (await other).call("add", 1, deadline_s=LONG) == 1
        assert await hosted.call("add", 1, deadline_s=LONG) == 1
        assert wait_until(lambda: gone(int(note.read_text())))

    hosts = Hosts(1)
    asyncio.run(work(hosts))
    hosts.close()


def test_a_worker_that_died_between_calls_is_replaced(file: str) -> None:
    async def work(hosts: Hosts) -> None:
        hosted = await counter(hosts, file)
        pid, _ = await hosted.call("echo", 0, pid=True, deadline_s=LONG)
        os.kill(pid, signal.SIGKILL)
        assert wait_until(lambda: gone(pid))
        assert await hosted.call("add", 1, deadline_s=LONG) == 1

    hosts = Hosts(1)
    asyncio.run(work(hosts))
    assert hosts.counts["deaths"] == 1
    hosts.close()


def test_closing_under_load_ends_calls_and_leaves_nothing(file: str) -> None:
    async def work(hosts: Hosts) -> None:
        objects = [await counter(hosts, file) for _ in range(6)]
        kept = await hosts.create(f"{file}:Engine", deadline_s=LONG)
        await kept.call("start", deadline_s=LONG)
        calls = [asyncio.create_task(each.call("hangs", deadline_s=LONG)) for each in objects]
        await asyncio.sleep(0.1)
        await asyncio.to_thread(hosts.close)
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(each) for each in found] == [ProcessLost] * 6
        with pytest.raises(ProcessLost, match="closed"):
            await counter(hosts, file)

    asyncio.run(asyncio.sleep(0))
    before = (children(), len(os.listdir("/proc/self/fd")))
    hosts = Hosts(2)
    asyncio.run(work(hosts))
    hosts.close()
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


DRIVER = """
import asyncio, os, signal, sys
from hybridflow.processes.hosts import Hosts
hosts = Hosts(1)
async def work():
    hosted = await hosts.create(sys.argv[1] + ":Counter", deadline_s=600)
    print((await hosted.call("echo", 0, pid=True, deadline_s=600))[0], flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(work())
"""


@pytest.mark.parametrize(("how", "status"), [("killed", -signal.SIGKILL), ("ends", 0)])
def test_workers_end_with_the_driver(file: str, how: str, status: int) -> None:
    driver = subprocess.run([sys.executable, "-c", DRIVER, file, how], capture_output=True, text=True)
    assert driver.returncode == status, driver.stderr
    assert wait_until(lambda: gone(int(driver.stdout)))
