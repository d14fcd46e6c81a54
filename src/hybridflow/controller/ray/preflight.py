"""What must hold before anything is started or asked for: a Ray that answers, a free port, devices where
pools want them.

address ──reach──► a Ray cluster answers there, and this machine is a node of it
pools, nodes ──assign──► for each node of each pool, a node of the cluster  (None: they do not fit; `shortage`
says it in words)
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.check_cluster import num_processes
from hybridflow.config.cluster import RayConfig
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.controller.resource_pool import ResourcePool, pools_of
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
MAX_TRIES = 10_000  # of laying pools out on nodes: far more than any cluster needs that has room
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the entry point of a submitted job
UNIT = {"cpu": "CPU", "cuda": "GPU"}

_START_HEAD = "`ray start --head` starts one, and `ray status` shows it"


@dataclass(frozen=True)
class NodeInfo:
    """A node of the cluster: what it offers of the kind of device that a run counts."""

    id: str
    name: str
    """For messages; unlike the ip, no two nodes of one machine share it."""
    ip: str
    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} ({self.ip}): {self.free} free of {self.total}"


def choose_address(key: str | None) -> str | None:
    """Where to look for a Ray: the key, RAY_ADDRESS, the cluster of a submitted job; None: start one of our
    own.
    """
    address = key or os.environ.get("RAY_ADDRESS") or ("auto" if JOB_VARIABLE in os.environ else None)
    return None if address == "local" else address


def look_ahead(trainer: TrainerConfig | SFTTrainerConfig, config: RayConfig) -> None:
    """What is wrong with the cluster that a run asks for, as far as can be told before torch is loaded;
    ConfigError where something is.
    """
    if trainer.controller != "ray":
        return
    given, address = config.ray_init, choose_address(config.ray_init.address)
    if address == "auto":
        return
    if address is not None:
        reach(address, source=source_of(config))
        _check_totals(address, trainer)
        return
    if given.include_dashboard and given.dashboard_port is not None:
        check_port_free(given.dashboard_port, "ray_kwargs.ray_init.dashboard_port")
    # `auto` is settled by torch; without such a file it can only be cpu
    no_gpu = not any(Path("/dev").glob("nvidia[0-9]*"))
    if trainer.device == "cpu" or (trainer.device == "auto" and no_gpu):
        nodes = max(
            (len(devices) for devices in getattr(trainer, "resource_pools", {}).values()),
            default=trainer.nnodes,
        )
        check_own(num_processes(trainer), nodes, given.num_cpus or num_cpus(), "cpu")


def source_of(config: RayConfig) -> str:
    """The name of what gave the address, for messages."""
    return "ray_kwargs.ray_init.address" if config.ray_init.address else "RAY_ADDRESS"


def num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reach(address: str, *, source: str, greet: bool = True) -> None:
    """Make sure, in seconds, that a Ray cluster answers at `host:port`, lets us in (`greet`) and has a node
    on this machine.

    `source` names where the address came from. Ray itself waits 20 to 60 seconds in each of these cases.
    Raises ConfigError.
    """
    host, port = _parse(address, source)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
        raise ConfigError(
            f"{source}={address}: no Ray can be reached there ({reason}); {_START_HEAD}"
        ) from error
    if greet:
        _greet(address, source)
    _check_node_here(host, port, source)


def answers(address: str) -> bool:
    """Whether anything listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def _parse(address: str, source: str) -> tuple[str, int]:
    scheme, _, rest = address.rpartition("://")
    if scheme == "ray":
        raise ConfigError(
            f"{source}={address}: tensors do not travel by Ray's client protocol; run on a node of the "
            "cluster with its "
            f"address ({rest.rsplit(':', 1)[0]}:6379), or through `ray job submit`"
        )
    if scheme:
        raise ConfigError(
            f"{source}={address} is the address of a dashboard: run through `ray job submit`, or give "
            "host:port of the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{source}={address} is no address: give host:port (Ray's own port is 6379), auto, or local"
        )
    return host.strip("[]"), int(port)


def _greet(address: str, source: str) -> None:
    """One question to the control service of the cluster, with a deadline: its client library has none below
    20 seconds.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # certificates are Ray's business
    try:
        import grpc
    except ImportError:  # ray without its [default] parts
        return
    token = _token()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(
                b"",
                timeout=CONNECT_SECONDS,
                metadata=(("authorization", f"Bearer {token}"),) if token else (),
            )
        except grpc.RpcError as error:
            code: Any = error.code()
            if code is not grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(
                    f"{source}={address}: something answers there, but it is no Ray cluster "
                    f"({code.name.lower()}); the cluster's port is "
                    "the one of `ray start --head --port` (6379), not that of the dashboard (8265) or of "
                    "Ray's client (10001)"
                ) from error
            wrong = "refuses this machine's token" if token else "asks for a token"
            raise ConfigError(
                f"{source}={address}: the Ray cluster {wrong}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
                "or ~/.ray/auth_token "
                "to the token of the node that was started first (`ray get-auth-token` prints it there)"
            ) from error


def _token() -> str | None:
    """The token that Ray would show the cluster, if any."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    try:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH")
        return (Path(path) if path else Path.home() / ".ray" / "auth_token").read_text().strip()
    except OSError:
        return None


def _check_node_here(host: str, port: int, source: str) -> None:
    """A driver talks to the cluster through the node on its own machine; without one Ray looks for it for a
    minute.
    """
    if not Path("/proc/self/cmdline").exists():
        return
    raylets = [words for _, words in processes() if words[0].endswith("raylet")]
    clusters = {
        word.partition("=")[2] for words in raylets for word in words if word.startswith("--gcs-address=")
    }
    if any(there.rpartition(":")[2] == str(port) for there in clusters):
        return
    others = f" (its nodes belong to {', '.join(sorted(clusters))})" if clusters else ""
    raise ConfigError(
        f"{source}={host}:{port}: that cluster has no node on this machine{others}; run `ray start "
        f"--address={host}:{port}` here first, "
        "or start the run on one of its nodes, or through `ray job submit`"
    )


def processes() -> Iterator[tuple[int, list[str]]]:
    """The processes of this machine with their command lines, where /proc shows them."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if words[0]:
            yield int(folder.name), words


def check_port_free(port: int, key: str) -> None:
    """ConfigError if something on this machine listens on `port` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"{key}={port} is in use on this machine ({error.strerror}): choose another port, or null "
                "for any"
            ) from error


def check_own(wanted: int, num_nodes: int, offered: int, device: str) -> None:
    """ConfigError if a Ray on this machine alone could not offer what is wanted, before it is started."""
    unit = UNIT[device]
    elsewhere = (
        "give the address of a cluster (ray_kwargs.ray_init.address or RAY_ADDRESS; docs/cluster/README.md)"
    )
    if num_nodes > 1:
        raise ConfigError(
            f"the run asks for {num_nodes} nodes, but no Ray cluster was named, and a Ray of its own has "
            f"this machine only: {elsewhere}, "
            "or set trainer.nnodes=1"
        )
    if wanted > offered:
        more = (
            f"set ray_kwargs.ray_init.num_cpus={wanted} to let processes share CPUs, or "
            if device == "cpu"
            else ""
        )
        raise ConfigError(
            f"the run asks for {wanted} processes, a {unit} each, but this machine offers {offered} "
            f"{unit}{'s' * (offered != 1)}: lower "
            f"trainer.n_gpus_per_node (or trainer.resource_pools), or {more}{elsewhere}"
        )


def living(
    table: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]], device: str
) -> list[NodeInfo]:
    """The nodes of Ray's table that are alive and answer, with what is free and there in all of GPUs for
    cuda, of CPUs for cpu.
    """
    # a node that was lost a moment ago is still alive to Ray, for seconds, and a run that starts again must
    # not go there
    alive = [
        node
        for node in table
        if node["Alive"] and answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    ]
    names, unit = [_name(node) for node in alive], UNIT[device]
    return [
        NodeInfo(
            id=node["NodeID"],
            name=name if names.count(name) == 1 else f"{name}#{node['NodeID'][:6]}",
            ip=node["NodeManagerAddress"],
            free=int(free.get(node["NodeID"], {}).get(unit, 0)),
            total=int(node["Resources"].get(unit, 0)),
        )
        for node, name in zip(alive, names)
    ]


def device_of(table: Sequence[Mapping[str, Any]]) -> str:
    """What `auto` means on a cluster: cuda where a living node has a GPU."""
    return "cuda" if any(node["Resources"].get("GPU", 0) for node in table if node["Alive"]) else "cpu"


def _name(node: Mapping[str, Any]) -> str:
    return str(
        node["NodeName"] if node["NodeName"] != node["NodeManagerAddress"] else node["NodeManagerHostname"]
    )


def _check_totals(address: str, trainer: TrainerConfig | SFTTrainerConfig) -> None:
    """ConfigError if the cluster has too few devices even when nobody else uses it; asked without joining it,
    which takes seconds.
    """
    try:
        table, free = _tables(address)
    except Exception as error:  # a way into Ray that another version may not have, or a cluster that refuses us: joining it will tell
        logger.debug(
            "the devices of the Ray cluster at %s could not be counted before joining it: %s", address, error
        )
        return
    device = device_of(table) if trainer.device == "auto" else trainer.device
    pools, nodes = pools_of(trainer), living(table, free, device)
    if assign(pools, nodes, by_total=True) is None:
        raise ConfigError(shortage(pools, nodes, device, f"the Ray cluster at {address}", own=False))


def _tables(address: str) -> tuple[list[dict[str, Any]], dict[str, dict[str, float]]]:
    """A cluster's nodes, and what is free on each; by way of what Ray's own commands use, for it offers
    nothing public.
    """
    from ray._private.state import GlobalState
    from ray._raylet import GcsClientOptions  # type: ignore[attr-defined]

    state = GlobalState()
    try:
        state._initialize_global_state(
            GcsClientOptions.create(address, None, allow_cluster_id_nil=True, fetch_cluster_id_if_nil=True)
        )
        return state.node_table(), state.available_resources_per_node()
    finally:
        state.disconnect()


def assign(
    pools: Sequence[ResourcePool], nodes: Sequence[NodeInfo], *, by_total: bool = False
) -> dict[str, list[NodeInfo]] | None:
    """A node of the cluster for each node of each pool, or None if they do not fit.

    The nodes of one pool are different ones; two pools may share a node. Largest wish first, into the node
    that it fills best: whole machines stay whole for those who need them. Among equal wishes of a pool nodes
    go by ip, so that a run started again has its ranks in the same places.
    """
    wishes = [
        Wish(count, pool.name, place) for pool in pools for place, count in enumerate(pool.devices_per_node)
    ]
    hosts = [Host(node, node.total if by_total else node.free) for node in sorted(nodes, key=_ip_key)]
    chosen = _fit(sorted(wishes, key=lambda wish: -wish.count), hosts, [MAX_TRIES])
    if chosen is None:
        return None
    return {
        pool.name: _by_ip(
            pool.devices_per_node, [chosen[pool.name, place] for place in range(len(pool.devices_per_node))]
        )
        for pool in pools
    }


@dataclass(frozen=True)
class Wish:
    """Devices that a pool wants on one node."""

    count: int
    pool: str
    place: int


@dataclass
class Host:
    """A node while pools are being laid out."""

    node: NodeInfo
    left: int
    pools: frozenset[str] = frozenset()


def _fit(
    wishes: Sequence[Wish], hosts: Sequence[Host], tries: list[int]
) -> dict[tuple[str, int], NodeInfo] | None:
    """Depth first, best fit first; hosts in the same state are tried once. Gives up after so many tries."""
    if not wishes:
        return {}
    wish, *rest = wishes
    tried: set[tuple[int, frozenset[str]]] = set()
    for host in sorted(hosts, key=lambda host: host.left):
        state = host.left, host.pools
        if host.left < wish.count or wish.pool in host.pools or state in tried or tries[0] <= 0:
            continue
        tried.add(state)
        tries[0] -= 1
        host.left, host.pools = host.left - wish.count, host.pools | {wish.pool}
        found = _fit(rest, hosts, tries)
        if found is not None:
            return {**found, (wish.pool, wish.place): host.node}
        host.left, host.pools = state
    return None


def _by_ip(counts: Sequence[int], nodes: Sequence[NodeInfo]) -> list[NodeInfo]:
    """The same nodes, those with equal counts in the order of their ips."""
    waiting = {
        count: sorted((node for c, node in zip(counts, nodes) if c == count), key=_ip_key)
        for count in set(counts)
    }
    return [waiting[count].pop(0) for count in counts]


def _ip_key(node: NodeInfo) -> tuple[int, int, str]:
    address = ipaddress.ip_address(node.ip)
    return address.version, int(address), node.id


def shortage(
    pools: Sequence[ResourcePool], nodes: Sequence[NodeInfo], device: str, where: str, own: bool
) -> str:
    """In words: what was wanted, what there is, and the way out."""
    unit = UNIT[device]
    wanted = sum(pool.world_size for pool in pools)
    total = sum(node.total for node in nodes)
    why = (
        f"{where} has {total}"
        if total < wanted
        else f"{where} does not have them free, or not on as many nodes"
    )
    lines = [f"the run wants {wanted} {unit}s, but {why}."]
    lines += [f"  wanted: pool {pool.name!r}, {describe(pool)}" for pool in pools]
    lines += [f"  there:  {node} {unit}s" for node in nodes] or ["  there:  no node"]
    if assign(pools, nodes, by_total=True) is not None:
        lines.append(
            "Others hold what is missing: wait until they end, or see `ray status` and `ray list "
            "placement-groups`."
        )
    elif total >= wanted:
        lines.append(
            "There are enough in all, but not on as many nodes as wanted: a pool's nodes are different "
            "machines."
        )
    way_out = "Lower trainer.nnodes or trainer.n_gpus_per_node (or trainer.resource_pools)"
    if own and device == "cpu":
        way_out += ", or set ray_kwargs.ray_init.num_cpus to let processes share CPUs"
    elif not own:
        way_out += ", or start more nodes (`ray start --address=…`)"
    return "\n".join([*lines, way_out + "."])


def describe(pool: ResourcePool) -> str:
    """For example `2 nodes × 4` or `nodes of 4, 2`."""
    counts = pool.devices_per_node
    if len(set(counts)) == 1:
        return f"{len(counts)} node{'s' * (len(counts) > 1)} × {counts[0]}"
    return f"nodes of {', '.join(map(str, counts))}"
