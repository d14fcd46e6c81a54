"""Worker processes that run the user's code, and that may be killed with all that it has started.

driver ──Hosts (asyncio)──► WorkerProcess: keeper ──► worker: host.py ──► tools, environments, rewards
"""

from hybridflow.processes.errors import CallFailed, CallRaised, CallTooLong, ProcessLost
from hybridflow.processes.hosts import Hosted, Hosts
from hybridflow.processes.local import HostsLike, LocalHosts, LocalObject, ObjectLike, in_thread

__all__ = [
    "CallFailed",
    "CallRaised",
    "CallTooLong",
    "Hosted",
    "Hosts",
    "HostsLike",
    "LocalHosts",
    "LocalObject",
    "ObjectLike",
    "ProcessLost",
    "in_thread",
]
