from __future__ import annotations

import http.server
import importlib
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import hybridflow.controller.ray
from hybridflow.config.cluster import RayConfig, choose_address
from hybridflow.controller.ray import session
from hybridflow.controller.ray.assignment import assign, describe, shortage
from hybridflow.controller.ray.preflight import NodeInfo, check_own, check_port_free, reach
from hybridflow.controller.resource_pool import ResourcePool
from hybridflow.errors import ConfigError

KEY = "ray_kwargs.ray_init.address"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_JOB_CONFIG_JSON_ENV_VAR",
        "RAY_USE_TLS",
    ):
        monkeypatch.delenv(name, raising=False)


def node(name: str, free: int, total: int | None = None, ip: str = "10.0.0.1") -> NodeInfo:
    return NodeInfo(name, name, ip, free, free if total is None else total)


# ---- where Ray is
# ---------------------------------------------------------------------------------------------------


def test_address_by_key_then_environment_then_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_address(None) is None
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert choose_address(None) == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "here:6379")
    assert choose_address(None) == "here:6379"
    assert choose_address("there:6379") == "there:6379"
    assert choose_address("local") is None


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("10.0.0.1", "is no address: give host:port"),
        ("10.0.0.1:port", "is no address: give host:port"),
        (
            "ray://10.0.0.1:10001",
            r"do not travel by Ray's client protocol.*\(10.0.0.1:6379\).*ray job submit",
        ),
        ("http://10.0.0.1:8265", "is the address of a dashboard.*ray job submit"),
        ("no-such-host.invalid:6379", "no Ray can be reached there"),
    ],
)
def test_addresses_that_cannot_be(address: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{KEY}={address}.*{says}"):
        reach(address, source=KEY)


def test_nothing_listens_there() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(
        ConfigError,
        match=rf"RAY_ADDRESS=127.0.0.1:{port}: no Ray can be reached there \(Connection refused\).*ray start",
    ):
        reach(f"127.0.0.1:{port}", source="RAY_ADDRESS")


def test_a_web_server_is_no_ray() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(
            ConfigError, match=r"no Ray cluster \(unavailable\).*6379.*not that of the dashboard \(8265\)"
        ):
            reach(f"127.0.0.1:{server.server_port}", source=KEY)
    finally:
        server.shutdown()
        server.server_close()


def test_a_silent_port_is_given_up() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ConfigError, match=r"no Ray cluster \(deadline_exceeded\)"):
            reach(f"127.0.0.1:{silent.getsockname()[1]}", source=KEY)


class ControlService(grpc.GenericRpcHandler):
    """Answers as a cluster's control service does to those who show `token`."""

    def __init__(self, token: str | None) -> None:
        self.token = token

    def service(self, call: Any) -> Any:
        if call.method != "/ray.rpc.NodeInfoGcsService/GetClusterId":
            return None
        shown = dict(call.invocation_metadata).get("authorization")

        def answer(request: bytes, context: Any) -> bytes:
            if self.token is not None and shown != f"Bearer {self.token}":
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "Authentication token is missing or incorrect")
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def control_service(token: str | None) -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(1), handlers=[ControlService(token)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_a_cluster_without_a_node_here() -> None:
    with (
        control_service(None) as address,
        pytest.raises(ConfigError, match=f"no node on this machine.*ray start --address={address}"),
    ):
        reach(address, source=KEY)


def test_a_cluster_that_wants_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    with control_service("right") as address:
        with pytest.raises(ConfigError, match="asks for a token; set RAY_AUTH_MODE=token"):
            reach(address, source=KEY)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
        with pytest.raises(ConfigError, match="refuses this machine's token"):
            reach(address, source=KEY)
        monkeypatch.setenv("RAY_AUTH_TOKEN", "right")
        with pytest.raises(ConfigError, match="no node on this machine"):  # the next thing to be wrong
            reach(address, source=KEY)


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"ray_kwargs.ray_init.dashboard_port={port} is in use.*choose another port"
        ):
            check_port_free(port, "ray_kwargs.ray_init.dashboard_port")
    check_port_free(port, "ray_kwargs.ray_init.dashboard_port")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs ray.*the extra 'ray'.*trainer.controller=local"):
        importlib.reload(hybridflow.controller.ray)


# ---- devices
# --------------------------------------------------------------------------------------------------------


def test_a_ray_of_our_own_that_would_be_too_small() -> None:
    check_own(2, 1, 2, "cpu")
    with pytest.raises(
        ConfigError,
        match=r"asks for 4 processes, a CPU each, but this machine offers 2 CPUs.*num_cpus=4.*RAY_ADDRESS",
    ):
        check_own(4, 1, 2, "cpu")
    with pytest.raises(
        ConfigError, match=r"a GPU each, but this machine offers 1 GPU: lower trainer.n_gpus_per_node"
    ):
        check_own(2, 1, 1, "cuda")
    with pytest.raises(
        ConfigError, match=r"asks for 2 nodes, but no Ray cluster was named.*trainer.nnodes=1"
    ):
        check_own(2, 2, 8, "cpu")


def test_a_pool_gets_different_nodes_in_the_order_of_ips() -> None:
    nodes = [node("b", 4, ip="10.0.0.10"), node("a", 4, ip="10.0.0.9"), node("c", 4, ip="10.0.0.11")]
    plan = assign([ResourcePool("global", (4, 4))], nodes)
    assert plan is not None and [there.name for there in plan["global"]] == ["a", "b"]
    assert assign([ResourcePool("global", (4, 4))], nodes[:1]) is None
    assert assign([ResourcePool("global", (2, 2))], [node("a", 4)]) is None, (
        "two nodes of a pool are two machines"
    )


def test_pools_share_nodes_and_small_ones_leave_whole_nodes_whole() -> None:
    nodes = [node("large", 8), node("used", 3, 8), node("small", 2)]
    plan = assign(
        [ResourcePool("rollout", (2,)), ResourcePool("train", (8,)), ResourcePool("critic", (2, 1))], nodes
    )
    assert plan is not None
    assert [there.name for there in plan["train"]] == ["large"]
    held: dict[str, int] = {}
    for pool, counts in (("rollout", (2,)), ("train", (8,)), ("critic", (2, 1))):
        assert len({there.name for there in plan[pool]}) == len(counts)
        for count, there in zip(counts, plan[pool]):
            held[there.name] = held.get(there.name, 0) + count
    assert held == {"large": 8, "used": 3, "small": 2}


def test_nodes_of_a_pool_keep_their_sizes() -> None:
    plan = assign(
        [ResourcePool("global", (2, 4))], [node("a", 4, ip="10.0.0.1"), node("b", 2, ip="10.0.0.2")]
    )
    assert plan is not None and [there.name for there in plan["global"]] == ["b", "a"]


def test_the_shortage_in_words() -> None:
    pools = [ResourcePool("train", (4, 4)), ResourcePool("rollout", (2,))]
    text = shortage(
        pools, [node("one", 1, 2), node("two", 4)], "cuda", "the Ray cluster at 10.0.0.1:6379", own=False
    )
    assert text.splitlines() == [
        "the run wants 10 GPUs, but the Ray cluster at 10.0.0.1:6379 has 6.",
        "  wanted: pool 'train', 2 nodes × 4",
        "  wanted: pool 'rollout', 1 node × 2",
        "  there:  one (10.0.0.1): 1 free of 2 GPUs",
        "  there:  two (10.0.0.1): 4 free of 4 GPUs",
        "Lower trainer.nnodes or trainer.n_gpus_per_node (or trainer.resource_pools), or start more nodes "
        "(`ray start --address=…`).",
    ]
    assert "Others hold what is missing" in shortage(
        [ResourcePool("a", (4,))], [node("one", 2, 4)], "cuda", "it", own=False
    )
    assert "not on as many nodes" in shortage(
        [ResourcePool("a", (2, 2))], [node("one", 4)], "cuda", "it", own=False
    )
    assert "num_cpus to let processes share" in shortage(
        [ResourcePool("a", (4,))], [node("one", 2)], "cpu", "it", own=True
    )
    assert describe(ResourcePool("a", (4, 2))) == "nodes of 4, 2"


@pytest.mark.parametrize("starts", [2, 3, 4])
def test_a_ray_that_does_not_start_in_time_is_tried_three_times(
    monkeypatch: pytest.MonkeyPatch, starts: int
) -> None:
    """Ray raises a plain Exception 30 s after a busy machine was asked; `starts`: the attempt that would
    succeed.
    """
    folders: list[Path] = []

    def init(config: RayConfig, *, address: str, **own: Any) -> str:
        folders.append(Path(own["_temp_dir"]))
        if len(folders) < starts:
            raise Exception("The current node timed out during startup. This could happen because …")
        return "127.0.0.1:8265"

    monkeypatch.setattr(session, "connect", init)
    # its own would end the Ray of the other tests
    monkeypatch.setattr(session, "end", lambda folder: Path(folder).rmdir())
    if starts > session.START_ATTEMPTS:
        with pytest.raises(ConfigError, match="3 times: this machine is too busy"):
            session.start(RayConfig())
        assert not any(folder.exists() for folder in folders)
    else:
        assert session.start(RayConfig()) == (str(folders[-1]), "127.0.0.1:8265") and len(folders) == starts
        assert [folder.exists() for folder in folders] == [False] * (starts - 1) + [True]
        folders[-1].rmdir()
