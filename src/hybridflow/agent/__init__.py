"""From prompts to trajectories: what a prompt row becomes by talking to the policy."""

from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import Generate, build_requests

__all__ = ["Generate", "build_requests", "collate"]
