"""The trackers that metrics go to, each in its own file."""

from hybridflow.observability.trackers.base import RunInfo, SampleRow, Tracker, Trackers
from hybridflow.observability.trackers.build import TRACKERS, build_trackers

__all__ = ["TRACKERS", "RunInfo", "SampleRow", "Tracker", "Trackers", "build_trackers"]
