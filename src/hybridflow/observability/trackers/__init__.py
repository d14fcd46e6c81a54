"""Where metrics go: console, JSONL, TensorBoard, wandb, mlflow, swanlab, each a file of its own behind one
small interface.
"""

from hybridflow.observability.trackers.base import RunInfo, SampleRow, Tracker, Trackers
from hybridflow.observability.trackers.build import TRACKERS, build_trackers

__all__ = ["TRACKERS", "RunInfo", "SampleRow", "Tracker", "Trackers", "build_trackers"]
