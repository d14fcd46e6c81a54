"""The surroundings of a run, as far as they can be told without Ray: a cluster that was named, and CPUs."""

from __future__ import annotations

import os

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the entry point of a submitted job


def choose_address(key: str | None) -> str | None:
    """Return the address of the Ray to join, or None where the run starts one of its own.

    The key comes first, then RAY_ADDRESS, then the cluster of the submitted job that this process belongs to.
    """
    address = key or os.environ.get("RAY_ADDRESS")
    if not address and JOB_VARIABLE in os.environ:
        return "auto"
    if address in ("", "local"):
        return None
    return address


def num_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
