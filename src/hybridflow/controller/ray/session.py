"""Connects this process to a Ray, with errors that say what to do, or starts a Ray for the run alone.

start    a new Ray in a temporary folder, reachable from this machine only
connect  `ray.init`, for a new Ray or one that runs already
end      `ray.shutdown`, then remaining processes are killed and the folder removed
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private import ray_constants

from hybridflow.config.cluster import RayConfig, num_cpus
from hybridflow.controller.ray.preflight import processes
from hybridflow.errors import ConfigError

logger = logging.getLogger(__name__)

# A node whose process is gone is dead after 4 s, one that does not answer after 12 s (Ray's own: 15 s and 65
# s).
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 4,
}
NICENESS = {"worker_niceness": 0}  # Ray's own 15 would let anything else on the machine come first
# keepers end what is below a worker's process; Ray would kill a keeper itself, and leave what is below it
CHILDREN = {"kill_child_processes_on_worker_exit": False}
START_ATTEMPTS = 3
REMOVE_SECONDS = 20.0
STARTUP_TIMEOUT = "timed out during startup"  # in the message of Ray's plain Exception
LOOPBACK = "127.0.0.1"
MAX_TEMP_LENGTH = 40  # sockets live some 60 characters below, and a socket's path has at most 107


def start(config: RayConfig, **offered: Any) -> tuple[str, str]:
    """Start a Ray in a new temporary folder; return the folder and the dashboard's address (or "").

    Ray gives a node 30 s to start, however busy the machine is. After that the start is retried; after
    the third attempt ConfigError is raised.
    """
    for attempt in range(1, START_ATTEMPTS + 1):
        parent = tempfile.gettempdir()
        if len(parent) > MAX_TEMP_LENGTH:
            parent = "/tmp"
        temp_dir = tempfile.mkdtemp(prefix="hf-ray-", dir=parent)
        try:
            with _on_loopback():
                dashboard = connect(
                    config,
                    address="local",
                    _temp_dir=temp_dir,
                    _node_ip_address=LOOPBACK,
                    _system_config={**HEALTH_CHECKS, **NICENESS, **CHILDREN},
                    **offered,
                )
            return temp_dir, dashboard
        except BaseException as error:
            end(temp_dir)
            if STARTUP_TIMEOUT not in str(error):
                raise
            load = os.getloadavg()[0]
            if attempt == START_ATTEMPTS:
                raise ConfigError(
                    f"Ray did not start within 30 s, {START_ATTEMPTS} times: this machine is too busy (its "
                    f"load is {load:.0f} on {num_cpus()} CPUs). Try again when it has less to do, or join a "
                    "Ray that runs already (ray_kwargs.ray_init.address)"
                ) from error
            logger.warning("Ray did not start within 30 s (the machine's load is %.0f): trying again", load)
    raise AssertionError("the loop returns or raises")


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let Ray start a node that listens on 127.0.0.1 only.

    Given that address, Ray replaces it by one that other machines can reach, unless it is set that this
    platform has no clusters.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Keep the driver's own handlers of SIGINT and SIGTERM, which Ray replaces when it connects.

    Ray sets a Python handler of SIGTERM, which ends the process in an orderly way, and below it a native one,
    which aborts the process three seconds after SIGTERM, in the middle of a save or of the end of the run.
    Every handler is therefore set again; where the driver had none for SIGTERM, Ray's Python handler stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler in (signal.SIG_DFL, None):
                handler = signal.getsignal(number)
            signal.signal(number, handler)


def connect(config: RayConfig, *, address: str, **own: Any) -> str:
    """Call `ray.init` and return the dashboard's address, or "" without one.

    `own` holds the further arguments for a Ray that is started here. Raises ConfigError, which says what to
    do, where Ray does not start or cannot be joined.
    """
    namespace = config.ray_init.namespace or f"hybridflow-{uuid.uuid4().hex[:8]}"
    runtime_env = config.ray_init.runtime_env or None
    try:
        with warnings.catch_warnings(), _signal_handlers_kept():
            # about environment variables of accelerators in later versions of Ray
            warnings.simplefilter("ignore", FutureWarning)
            given: dict[str, Any] = {"namespace": namespace, "runtime_env": runtime_env, **own}
            context = ray.init(address=address, log_to_driver=True, logging_level=logging.ERROR, **given)
            return context.dashboard_url or ""
    except (RuntimeError, ConnectionError, ValueError) as error:
        text = " ".join(str(error).split())
        if "Version mismatch" in text:
            raise ConfigError(
                f"the Ray cluster at {address} and this process differ, install the same versions on all "
                f"nodes: {text}"
            ) from error
        if "merge the Job's runtime env" in text:
            raise ConfigError(
                "ray_kwargs.ray_init.runtime_env sets what the runtime environment of the submitted job "
                f"sets too: leave one of them out ({config.ray_init.runtime_env})"
            ) from error
        if own:
            raise ConfigError(f"Ray did not start on this machine: {text}") from error
        raise ConfigError(f"the Ray cluster at {address} could not be joined: {text}") from error


def end(temp_dir: str) -> None:
    """Stop the Ray whose folder is `temp_dir`, kill the processes that it left, and remove the folder."""
    try:
        if ray.is_initialized():
            ray.shutdown()
    finally:
        for pid, words in processes():
            if pid != os.getpid() and any(temp_dir in word for word in words):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
                logger.debug("killed process %d (%s) that Ray left behind", pid, words[0])
        until = time.monotonic() + REMOVE_SECONDS
        shutil.rmtree(temp_dir, ignore_errors=True)
        # a process on its way out may still write
        while os.path.exists(temp_dir) and time.monotonic() < until:
            time.sleep(0.1)
            shutil.rmtree(temp_dir, ignore_errors=True)
