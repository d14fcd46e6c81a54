"""Processes of ours outside Ray, which may be killed with all that they have started (`supervisor.py`).

driver ──Hosts (asyncio)──► keeper ──► worker: host.py ──► tools, environments, rewards
       ──SupervisedProcess► keeper ──► command of an agent, an environment, an engine's server
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
