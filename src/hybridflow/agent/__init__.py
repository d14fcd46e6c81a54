"""The agent room: prompt rows become trajectories by talking to the policy."""

from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import RequestBatch, build_requests, demonstration_outputs, one_more_each

__all__ = ["RequestBatch", "build_requests", "collate", "demonstration_outputs", "one_more_each"]
