"""Worker processes that run the user's code, and that may be killed with all that it has started.

driver ──Hosts (asyncio)──► WorkerProcess: keeper ──► worker: host.py ──► the user's tools, environments
driver ──RewardPool───────► WorkerProcess: keeper ──► worker: rewards/worker.py ──► the reward function
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
