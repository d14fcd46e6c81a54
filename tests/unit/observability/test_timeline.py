from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridflow.observability.report.follow import RunFollower
from hybridflow.observability.timing import MOST_SPANS, MOST_TRAJECTORIES, Timeline, Timer, timeline
from hybridflow.observability.trackers import build_trackers
from hybridflow.observability.trackers.jsonl import StepLines, lanes_of
from hybridflow.protocol.spans import TraceSpan


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_run_drops_the_lines_of_later_steps_and_torn_ones(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    first = StepLines(file, -1)
    assert not file.exists(), "a file appears with its first line"
    for step in (1, 2, 3):
        first.write(step, {"text": "\ud800"})
    with file.open("a") as more:
        more.write('{"step": 1, "te')
    StepLines(file, 2).write(3, {"text": "new"})
    assert [(line["step"], line["text"]) for line in lines_of(file)] == [
        (1, "\ud800"),
        (2, "\ud800"),
        (3, "new"),
    ]
    StepLines(file, -1)
    assert file.read_bytes() == b""


def test_sections_of_a_step_are_written_with_their_lanes(tmp_path: Path) -> None:
    timer = Timer()
    with timer("gen"):
        pass
    pools = {"trainer": {"resource_pools": {"train": [1], "gen": [1]}, "placement": {"rollout": "gen"}}}
    with build_trackers("jsonl", tmp_path, config_dict=pools) as trackers:
        with timer("step"), timer("gen"), timer("reward"):
            pass
        with pytest.raises(ValueError), timer("update_actor"):
            raise ValueError
        trackers.log({"a": 1.0}, 1)
        with timer("save_checkpoint"):
            pass
        trackers.log({"b": 1.0}, 1)
        trackers.log({"a": 2.0}, 2)
    with timer("gen"):
        pass
    assert not timeline.take(), "nothing is kept where nobody takes it"
    follower = RunFollower(tmp_path)
    follower.poll()
    (step,) = follower.changes()["timeline"]
    assert step["step"] == 1, "a step without spans has no line"
    assert [tuple(span[:2]) for span in step["spans"]] == [
        ("driver", "reward"),
        ("pool gen", "gen"),
        ("driver", "step"),
        ("pool train", "update_actor"),
        ("pool train", "save_checkpoint"),
    ]
    assert all(0 <= end - start < 600 for *_, start, end in step["spans"])


def test_lanes_are_pools_or_all_devices() -> None:
    assert set(lanes_of({}).values()) == {"devices"}
    trainer = {"resource_pools": {"a": [1], "b": [1]}, "placement": {"rollout": ["a", "b"], "critic": "b"}}
    lanes = lanes_of({"trainer": trainer})
    assert (lanes["rollout"], lanes["critic"], lanes["actor"]) == ("pool a, b", "pool b", "pool a")


def test_a_timeline_that_nobody_empties_stays_small() -> None:
    full = Timeline()
    full.start()
    for _ in range(MOST_SPANS + 10):
        full.add("a", "b", 0.0, 1.0)
    assert len(full.take()) == MOST_SPANS and full.take() == []


def test_the_first_trajectories_of_a_step_have_lanes() -> None:
    times = Timeline()
    spans = [TraceSpan("generate", 1.0, 2.0), TraceSpan("tool", 2.0, 2.5)]
    times.add_trajectory(1, spans)
    assert times.take() == [], "nobody takes them"
    times.start()
    for number in range(MOST_TRAJECTORIES + 5):
        times.add_trajectory(number, spans)
    taken = times.take()
    assert taken[:2] == [("trajectory 0", "generate", 1.0, 2.0), ("trajectory 0", "tool", 2.0, 2.5)]
    assert len(taken) == 2 * MOST_TRAJECTORIES
    times.add_trajectory(99, spans)
    assert [span[0] for span in times.take()] == ["trajectory 99"] * 2
