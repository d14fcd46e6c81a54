"""What is in each library's own storage after a run: by its own reader, or by its own format of files."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = "demo"


@dataclass
class Stored:
    """A run as a library holds it: `metrics[step][name]`, the text of its samples, and how it ended."""

    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    samples: str = ""
    runs: set[str] = field(default_factory=set)
    """Ids under which its parts are filed."""
    outcome: str = ""
    config: str = ""

    def add(self, step: int, name: str, value: float) -> None:
        self.metrics.setdefault(step, {})[name] = value


def tensorboard(folder: Path) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0}
    ).Reload()
    stored = Stored(runs={"tensorboard"})
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            stored.add(event.step, name, event.value)
    texts = {
        tag: events.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]
    }
    stored.samples = "\n".join(text for tag, text in texts.items() if "generations" in tag)
    stored.outcome = texts["outcome/text_summary"]
    stored.config = texts["config/text_summary"]
    return stored


def log_records(file: Path) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format, which wandb writes; one that was cut off ends it.

    A file is made of blocks. A record is a header (checksum, length, kind) and its bytes, or several pieces.
    """
    block, header = 32768, 7
    data = file.read_bytes()
    whole, first, middle, last = 1, 2, 3, 4
    place = header  # the first header is the file's own
    pieces = b""
    while place + header <= len(data):
        left = block - place % block
        if left < header:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + header])
        piece = data[place + header : place + header + length]
        if len(piece) < length or kind not in (whole, first, middle, last):
            return
        pieces = piece if kind in (whole, first) else pieces + piece
        if kind in (whole, last):
            yield pieces
        place += header + length


def wandb(folder: Path) -> Stored:
    from wandb.proto import wandb_internal_pb2

    stored = Stored()
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in log_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                stored.runs.add(record.run.run_id)
                stored.config += str(record.run.config)
            if record.HasField("exit"):
                stored.outcome = str(record.exit.exit_code)
            for item in record.history.item:
                name = "/".join(item.nested_key) or item.key
                value = json.loads(item.value_json) if item.value_json else None
                if isinstance(value, (int, float)) and not name.startswith("_"):
                    stored.add(record.history.step.num, name, value)
        for table in sorted((file.parent / "files" / "media" / "table").rglob("*.json")):
            stored.samples += table.read_text()
    return stored


def mlflow(folder: Path) -> Stored:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name(PROJECT)
    stored = Stored()
    for run in client.search_runs([experiment.experiment_id]):
        stored.runs.add(run.info.run_id)
        stored.outcome = run.info.status
        stored.config = str(run.data.params)
        for name in run.data.metrics:
            for value in sorted(
                client.get_metric_history(run.info.run_id, name), key=lambda one: one.timestamp
            ):
                stored.add(value.step, name.replace("_at_", "@"), value.value)
        for artifact in client.list_artifacts(run.info.run_id, "generations"):
            stored.samples += Path(client.download_artifacts(run.info.run_id, artifact.path)).read_text()
    return stored


def swanlab(folder: Path) -> Stored:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    stored = Stored()
    for file in sorted((folder / "swanlab").glob("run-*/run-*.swanlab")):
        stored.runs.add(file.stem.removeprefix("run-"))
        if file.stat().st_size == 0:  # killed: this library writes as it ends
            continue
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            if record.HasField("scalar"):
                stored.add(record.scalar.step, record.scalar.key, record.scalar.value.number)
            if record.HasField("finish"):
                stored.outcome = RunState.Name(record.finish.state)
        stored.samples = "".join(
            text.read_text() for text in sorted((file.parent / "media" / "text").rglob("*.txt"))
        )
        stored.config = (file.parent / "files" / "config.yaml").read_text()
    return stored


def trackio(_: Path) -> Stored:
    from trackio import Api
    from trackio.sqlite_storage import SQLiteStorage

    stored = Stored()
    for run in Api().runs(PROJECT):
        stored.runs.add(run.id)
        stored.config = str(run.config)
        stored.outcome = str(run.alerts())
        for line in SQLiteStorage.get_logs(PROJECT, run.name, run_id=run.id):
            for name, value in line.items():
                if isinstance(value, (int, float)) and name != "step":
                    stored.add(line["step"], name, value)
                elif name == "val/generations":
                    stored.samples += json.dumps(value)
    return stored


def clearml(folder: Path) -> Stored:
    """Of the newest session: a session that was killed is left in a folder, one that ended is a zip file."""
    session = max((folder / "clearml" / "offline").glob("*.zip"), key=lambda file: file.stat().st_mtime)
    stored = Stored(runs={session.stem})
    with zipfile.ZipFile(session) as held:
        lines = [
            event for line in held.read("metrics.jsonl").splitlines() if line for event in json.loads(line)
        ]
        stored.outcome = held.read("log.jsonl").decode()
        stored.config = held.read("task.json").decode()
    for event in lines:
        if event["type"] == "training_stats_scalar":
            series = "" if event["variant"] == event["metric"] else f"/{event['variant']}"
            stored.add(event["iter"], event["metric"] + series, event["value"])
        elif event["type"] == "plot":
            stored.samples += event["plot_str"]
    return stored


READERS = {each.__name__: each for each in (tensorboard, wandb, mlflow, swanlab, trackio, clearml)}
