"""The conformance suite on two processes, and what only processes can do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
import torch
from house import Counter, CounterGroup
from ray.exceptions import ObjectLostError
from ray_house import Prober, ask, make_broken, start
from test_backend_conformance import *  # noqa: F403 the tests of the suites, with the fixtures below in the place of theirs

from hybridflow.controller.local import WorkerHost
from hybridflow.controller.ray import process
from hybridflow.controller.ray.backend import RayBackend
from hybridflow.controller.ray.cluster import RayCluster
from hybridflow.controller.ray.process import RankProcess
from hybridflow.controller.ray.running import Failure
from hybridflow.controller.ray.transport import encode
from hybridflow.controller.worker import Place
from hybridflow.errors import WorkerError, WorkerLost
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

# processes start slowly on a busy machine: once for all
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray")]


@pytest.fixture
def make_backend(backend: RayBackend) -> Callable[[], RayBackend]:
    return lambda: backend


@pytest.fixture
def group(backend: RayBackend) -> CounterGroup:
    """The suite's own would shut the backend down after each test."""
    return CounterGroup(backend, "counter")


def big(rows: int = 64) -> DataProto:
    """256 KiB: too large to travel inside a call."""
    return DataProto.from_dict(
        {"x": torch.randn(rows, 1024), "flag": torch.arange(rows) % 2 == 0},
        {"uid": [f"u{i}" for i in range(rows)]},
    )


def test_columns_that_are_kept_do_not_pass_the_driver_again(group: CounterGroup) -> None:
    """What travels by value is counted: at first the rows, then only places."""
    batch = big()
    column = batch.batch["x"].nbytes

    def moved(call: Callable[[], DataProto | Metrics]) -> int:
        nonlocal found
        group.backend.driver_bytes()
        found = call()
        return group.backend.driver_bytes()

    found: DataProto | Metrics = DataProto()
    write = partial(group.call_and_keep, Counter.double, ["doubled", "uid"])
    assert column <= moved(lambda: write(batch)) < 1.1 * column
    assert isinstance(found, DataProto)
    batch |= found.select(["doubled"])
    assert column <= moved(lambda: group.keep(batch, ["x"])) < 1.1 * column
    assert isinstance(found, DataProto)
    batch |= found
    assert moved(lambda: group.call(Counter.mean_of_both, batch)) < 0.1 * column
    half = batch.select_idxs(range(40, 8, -1))
    fetched = moved(lambda: group.fetch(half, ["doubled"]))
    assert 0.5 * column <= fetched < 0.6 * column, "the rows that are asked for, and not their shards"
    assert isinstance(found, DataProto) and found.names() == ["doubled"]
    assert torch.equal(found.batch["doubled"], 2 * half.batch["x"])


def test_roles_of_a_pool_share_processes_and_pools_are_worlds(backend: RayBackend) -> None:
    seen = {
        role: ask(backend, role).call_list(Prober.look) for role in ("counter", "other", "critic", "rollout")
    }
    assert seen["counter"] == seen["other"]
    assert [look[1:] for look in seen["counter"]] == [(0, 0, 2), (1, 1, 2)]
    assert [look[1:] for look in seen["critic"]] == [(0, 0, 0)]  # alone: no group to join
    assert [look[0] for look in seen["rollout"]] == [look[0] for look in (*seen["counter"], *seen["critic"])]
    assert [look[1] for look in seen["rollout"]] == [0, 1, 2]
    assert os.getpid() not in [look[0] for look in seen["rollout"]]
    assert backend.are_colocated("counter", "rollout") and not backend.are_colocated("counter", "critic")
    assert ask(backend).call(Prober.sum_of_ranks) == 3.0


def test_large_batches_go_and_come_back(backend: RayBackend) -> None:
    batch = big()
    back = ask(backend).call(Prober.echo, batch)
    assert torch.equal(back.batch["x"], batch.batch["x"]) and torch.equal(
        back.batch["flag"], batch.batch["flag"]
    )
    assert list(back.non_tensor_batch["uid"]) == list(batch.non_tensor_batch["uid"])


def test_writing_into_large_arguments_is_refused(backend: RayBackend) -> None:
    batch = big()
    before = batch.batch["x"].clone()
    with pytest.raises(AssertionError, match=r"counter\.scribble wrote in place into .*x of its arguments"):
        ask(backend).call(Counter.scribble, batch)
    assert torch.equal(batch.batch["x"], before)


def test_results_pass_from_rank_to_rank_without_the_driver(backend: RayBackend) -> None:
    made = ask(backend).submit(Prober.state)
    ask(backend, "other").call(Prober.load, made.by_reference())
    assert all(part._fetched is None for part in made.parts.values())  # type: ignore[attr-defined]
    made.parts[0].result()["value"][0] = 9.0
    with pytest.raises(AssertionError, match=r"value in the result of counter\.state was written in place"):
        ask(backend, "other").submit(Prober.load, made.by_reference())


def test_an_argument_that_is_gone_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a rank that died after it had answered: the run may start again."""

    def get(references: list[object]) -> None:
        raise ObjectLostError("0" * 56, b"", "")

    monkeypatch.setattr(ray, "get", get)
    process = RankProcess(Place())
    process._host = WorkerHost(Place(), lambda host: {})
    failure, _ = process.invoke("actor", "update", True, encode(((), {})), [object()])
    assert isinstance(failure, Failure)
    error = failure.exception("actor", "update", 0)
    assert (
        isinstance(error, WorkerLost)
        and error.method == "update"
        and "an argument of actor.update is lost" in str(error)
    )


def test_calls_of_two_pools_overlap_from_two_threads(backend: RayBackend, tmp_path: Path) -> None:
    met: dict[str, bool] = {}

    def call(role: str) -> None:
        met[role] = ask(backend, role).call(Prober.meet, str(tmp_path), 2)

    threads = [threading.Thread(target=call, args=(role,)) for role in ("counter", "critic")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == {"counter": True, "critic": True}


def test_collectives_meet_whichever_thread_calls(backend: RayBackend) -> None:
    failures: list[BaseException] = []

    def many(role: str) -> None:
        try:
            for _ in range(20):
                assert ask(backend, role).call(Prober.sum_of_ranks) == 3.0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=many, args=(role,)) for role in ("counter", "other") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_result_that_cannot_travel_says_so(backend: RayBackend) -> None:
    with pytest.raises(TypeError, match="generator") as caught:
        ask(backend).call(Prober.bad_result)
    assert any("counter.bad_result, rank 0" in note for note in caught.value.__notes__)


def test_memory_is_given_back(backend: RayBackend) -> None:
    def held() -> tuple[float, int]:
        """MiB of the driver's own memory, and objects of the store that it keeps alive."""
        memory = psutil.Process().memory_info()
        return (memory.rss - memory.shared) / 2**20, len(
            ray._private.worker.global_worker.core_worker.get_all_reference_counts()
        )

    batch = DataProto.from_dict({"x": torch.randn(256, 4096)})  # 4 MiB
    before = after = held()
    for step in range(40):
        assert len(ask(backend).call(Prober.echo, batch)) == 256
        before, after = (held() if step == 9 else before), held()
    assert after[0] - before[0] < 40  # 30 steps made 240 MiB of arguments and results
    assert after[1] <= before[1] + 4


def test_the_rank_that_failed_is_named_and_those_that_hang_are_ended(backend: RayBackend) -> None:
    pids = [look[0] for look in ask(backend).call_list(Prober.look)]
    with pytest.raises(WorkerError, match="Picky: it was me") as caught:
        ask(backend).call(Prober.fail_alone, 1)
    notes = "\n".join(caught.value.__notes__)
    # the frame of its own traceback
    assert "in counter.fail_alone, rank 1" in notes and "in fail_alone" in str(caught.value.__cause__)
    assert f"process {pids[1]}" in notes and "did not end on ranks [0]" in notes
    with pytest.raises(WorkerError, match="Picky: it was me"):
        ask(backend).call_list(Prober.look)
    backend.shutdown()
    backend.shutdown()
    with pytest.raises(AssertionError, match="the backend is shut down"):
        ask(backend).call(Prober.span, 0.0)


@pytest.fixture
def own(cluster: RayCluster) -> Iterator[Callable[..., RayBackend]]:
    """Backends that the test may break."""
    started: list[RayBackend] = []

    def make(**settings: float) -> RayBackend:
        started.append(start(cluster, {"global": 2}, {"counter": "global"}, **settings))
        return started[-1]

    yield make
    for backend in started:
        backend.shutdown()


@pytest.mark.slow
def test_a_killed_process_is_lost_with_its_cause(own: Callable[..., RayBackend]) -> None:
    backend = own()
    future = ask(backend).submit(Prober.span, 600.0)
    pids = [process.pid for process in backend._processes.values()]
    time.sleep(1.0)
    os.kill(pids[1], 9)
    with pytest.raises(WorkerLost, match=r"counter rank 1 is lost during counter\.span .*signal 9") as caught:
        future.result()
    assert (caught.value.role, caught.value.rank, caught.value.method) == ("counter", 1, "span")
    backend.shutdown()


@pytest.mark.slow
def test_rows_of_a_lost_process_are_lost_and_others_stay(own: Callable[..., RayBackend]) -> None:
    backend = own()
    before = big()
    kept = ask(backend).call_and_keep(Prober.write_or_die, ["doubled"], before, rank=-1)
    with pytest.raises(WorkerLost):
        ask(backend).call_and_keep(Prober.write_or_die, ["doubled"], big(), rank=1)
    backend.shutdown()
    read = kept.select_idxs([63, 1]).materialized().batch["doubled"]
    assert torch.equal(read, before.batch["x"][[63, 1]] * 2)


def test_a_process_goes_where_the_driver_is_if_its_node_has_that_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "setup_logging", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)  # and back, at the end
    here = tmp_path / "driver"
    here.mkdir()
    rank = RankProcess(Place("train", 0, 1, 0, "node"))
    for folder in (here, tmp_path / "on the driver's node only"):
        rank._set_up(process.ProcessSettings("cpu", None, "", 0, 1.0, str(folder)))
        assert Path.cwd() == here


@pytest.mark.slow
def test_a_call_beyond_its_deadline_ends(
    own: Callable[..., RayBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = own(call_timeout=2.0)
    assert ask(backend).call_list(Prober.folder) == [str(tmp_path)] * 2  # Ray was started elsewhere
    with pytest.raises(
        WorkerError,
        match=r"counter\.span has not finished after 2 s on ranks \[0, 1\].*trainer\.worker_timeout",
    ) as caught:
        ask(backend).call(Prober.span, 600.0)
    assert "time.sleep(seconds)" in "\n".join(caught.value.__notes__)


@pytest.mark.slow
def test_a_role_that_cannot_be_built(cluster: RayCluster) -> None:
    with pytest.raises(ValueError, match="no model for rank 0") as caught:
        start(cluster, {"global": 1}, {"counter": "global"}, make_broken)
    assert any("while building role 'counter', rank 0" in note for note in caught.value.__notes__)
