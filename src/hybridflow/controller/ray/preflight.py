"""Checks before a Ray is started or joined: it answers, ports are free, and there are devices for all pools.

look_ahead    everything that can be checked before torch is loaded
reach         a Ray cluster answers at an address, and this machine is one of its nodes
check_own     a Ray on this machine alone would have enough devices
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.config.cluster import RayConfig, choose_address, num_cpus
from hybridflow.config.layout import num_processes
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.distributed.accelerators import accelerators, features, no_accelerator
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0


@dataclass(frozen=True)
class NodeInfo:
    """A node of the cluster, with its number of devices of the kind that the run uses."""

    id: str
    name: str
    """The name in messages; unlike the ip it differs between two nodes on one machine."""
    ip: str
    free: int
    total: int

    def __str__(self) -> str:
        return f"{self.name} ({self.ip}): {self.free} free of {self.total}"


def look_ahead(trainer: TrainerConfig | SFTTrainerConfig, config: RayConfig) -> None:
    """Check the cluster that a run asks for, as far as is possible before torch is loaded.

    Raises ConfigError where it cannot be reached, or where this machine alone would be too small.
    """
    if trainer.controller != "ray":
        return
    given = config.ray_init
    address = choose_address(given.address)
    if address == "auto":
        return
    if address is not None:
        reach(address, source=source_of(config))
        return
    if given.include_dashboard and given.dashboard_port is not None:
        check_port_free(given.dashboard_port, "ray_kwargs.ray_init.dashboard_port")
    if trainer.device == "cpu" or (trainer.device == "auto" and no_accelerator() is not None):
        nodes = max(
            (len(devices) for devices in getattr(trainer, "resource_pools", {}).values()),
            default=trainer.nnodes,
        )
        check_own(num_processes(trainer), nodes, given.num_cpus or num_cpus(), "cpu")


def source_of(config: RayConfig) -> str:
    """Return the name of the key or variable that holds the address, for messages."""
    if config.ray_init.address:
        return "ray_kwargs.ray_init.address"
    return "RAY_ADDRESS"


def reach(address: str, *, source: str, greet: bool = True) -> None:
    """Make sure, within seconds, that a Ray cluster at `host:port` can be joined from this machine.

    It must answer, accept this process's token (asked only with `greet`), and have a node here. `source` is
    the key or variable that holds the address. Raises ConfigError, for which Ray would take 20 to 60 s.
    """
    host, port = _parse(address, source)
    try:
        socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, TimeoutError):
            reason = f"no answer within {CONNECT_SECONDS:.0f} s"
        raise ConfigError(
            f"{source}={address}: no Ray can be reached there ({reason}); `ray start --head` starts one, and "
            "`ray status` shows it"
        ) from error
    if greet:
        _greet(address, source)
    _check_node_here(host, port, source)


def answers(address: str) -> bool:
    """Return whether anything listens at `host:port`."""
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
            f"cluster with its address ({rest.rsplit(':', 1)[0]}:6379), or through `ray job submit`"
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
    """Ask the cluster's control service for its id; raise ConfigError where it refuses or is no Ray.

    Ray's own client has no deadline below 20 seconds.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return  # only Ray knows the certificates
    try:
        import grpc
    except ImportError:  # ray without its [default] parts
        return
    token = _token()
    metadata = []
    if token is not None:
        metadata.append(("authorization", f"Bearer {token}"))
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        ask = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            ask(b"", timeout=CONNECT_SECONDS, metadata=metadata)
        except grpc.RpcError as error:
            code: Any = error.code()
            if code is not grpc.StatusCode.UNAUTHENTICATED:
                raise ConfigError(
                    f"{source}={address}: something answers there, but it is no Ray cluster "
                    f"({code.name.lower()}); the cluster's port is the one of `ray start --head --port` "
                    "(6379), not that of the dashboard (8265) or of Ray's client (10001)"
                ) from error
            wrong = "asks for a token"
            if token:
                wrong = "refuses this machine's token"
            raise ConfigError(
                f"{source}={address}: the Ray cluster {wrong}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
                "or ~/.ray/auth_token to the token of the node that was started first (`ray get-auth-token` "
                "prints it there)"
            ) from error


def _token() -> str | None:
    """Return the token that Ray would show the cluster, or None where token mode is off."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        return None
    if given := os.environ.get("RAY_AUTH_TOKEN"):
        return given.strip()
    try:
        path = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        return Path(path).read_text().strip()
    except OSError:
        return None


def _check_node_here(host: str, port: int, source: str) -> None:
    """Raise ConfigError where the cluster has no node on this machine, through which a driver talks to it.

    Ray itself would look for one for a minute.
    """
    if not Path("/proc/self/cmdline").exists():
        return
    raylets = [words for _, words in processes() if words[0].endswith("raylet")]
    clusters = {
        word.partition("=")[2] for words in raylets for word in words if word.startswith("--gcs-address=")
    }
    if any(there.rpartition(":")[2] == str(port) for there in clusters):
        return
    others = ""
    if clusters:
        others = f" (the nodes here belong to {', '.join(sorted(clusters))})"
    raise ConfigError(
        f"{source}={host}:{port}: that cluster has no node on this machine{others}; run `ray start "
        f"--address={host}:{port}` here first, or start the run on one of its nodes, or through `ray job "
        "submit`"
    )


def processes() -> Iterator[tuple[int, list[str]]]:
    """Yield the processes of this machine, as pid and words of the command line, where there is a /proc."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile
            continue
        if words[0]:
            yield int(folder.name), words


def check_port_free(port: int, key: str) -> None:
    """Raise ConfigError if something on this machine already listens on `port`."""
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
    """Raise ConfigError if a Ray on this machine alone could not offer the devices that are wanted."""
    unit = features(device).resource
    elsewhere = (
        "give the address of a cluster (ray_kwargs.ray_init.address or RAY_ADDRESS; docs/cluster/README.md)"
    )
    if num_nodes > 1:
        raise ConfigError(
            f"the run asks for {num_nodes} nodes, but no Ray cluster was named, and a Ray of its own has "
            f"this machine only: {elsewhere}, or set trainer.nnodes=1"
        )
    if wanted > offered:
        more = ""
        if device == "cpu":
            more = f"set ray_kwargs.ray_init.num_cpus={wanted} to let processes share CPUs, or "
        raise ConfigError(
            f"the run asks for {wanted} processes, a {unit} each, but this machine offers {offered} "
            f"{unit}{'s' * (offered != 1)}: lower "
            f"trainer.n_gpus_per_node (or trainer.resource_pools), or {more}{elsewhere}"
        )


def living(
    table: Sequence[Mapping[str, Any]], free: Mapping[str, Mapping[str, float]], device: str
) -> list[NodeInfo]:
    """Return the nodes of Ray's table that answer, with their devices of this kind."""
    # Ray takes a node that was just lost for alive for some seconds, and a restarted run must not go there
    alive = [
        node
        for node in table
        if node["Alive"] and answers(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
    ]
    names = [_name(node) for node in alive]
    unit = features(device).resource
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


def device_of(table: Sequence[Mapping[str, Any]], num_here: Callable[[str], int]) -> str:
    """Return the kind of accelerator that living nodes of the cluster have, and cpu without any.

    Several kinds may have one resource of Ray, or a node each: then it is the first of those of which this
    machine has a device (`num_here` counts them), and without any here the first of the table.
    """
    offered = [
        kind
        for kind, row in accelerators().items()
        if kind != "cpu" and any(node["Resources"].get(row.resource, 0) for node in table if node["Alive"])
    ]
    here = [kind for kind in offered if num_here(kind)]
    return next(iter([*here, *offered]), "cpu")


def _name(node: Mapping[str, Any]) -> str:
    if node["NodeName"] != node["NodeManagerAddress"]:
        return str(node["NodeName"])
    return str(node["NodeManagerHostname"])
