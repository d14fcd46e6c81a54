"""What the page of a run gets while the run writes, and who gets it."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observability.report import LiveServer
from hybridflow.observability.report.follow import MAX_ROLLOUTS, RunFollower
from hybridflow.observability.samples import SampleWriter
from hybridflow.observability.trackers import build_trackers


def polled(follower: RunFollower, cursor: str = "") -> dict[str, Any]:
    follower.poll()
    return follower.changes(cursor)


def test_a_run_that_is_not_there_yet_is_an_empty_one_and_may_come(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path / "run")
    first = polled(follower)
    assert first["reset"] and first["steps"] == [] and first["rollouts"] == [] and first["written"] is None
    again = polled(follower, first["cursor"])
    assert not again["reset"] and "steps" not in again, "no news"
    with build_trackers("jsonl", tmp_path / "run") as trackers:
        trackers.log({"a": 1.0}, 1)
    news = polled(follower, again["cursor"])
    assert not news["reset"] and news["steps"] == [1] and news["metrics"] == {"a": [1.0]} and news["written"]


def test_only_what_is_new_is_told_and_a_line_that_grows_is_told_again(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    with build_trackers("jsonl", tmp_path) as trackers:
        trackers.log({"a": 1.0}, 1)
        trackers.log({"a": 2.0}, 2)
        cursor = polled(follower)["cursor"]
        trackers.log({"b": 5.0}, 2)  # what comes after a step goes into its line
        news = polled(follower, cursor)
        assert news["steps"] == [2] and news["metrics"] == {"a": [2.0], "b": [5.0]}
        trackers.log({"a": 3.0}, 3)
        assert polled(follower, news["cursor"])["steps"] == [3]


def test_half_of_a_line_waits_for_the_other_half(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a": 2')
    follower = RunFollower(tmp_path)
    first = polled(follower)
    assert first["steps"] == [1]
    with file.open("a") as more:
        more.write('2.5}\nnot json\n{"step": 3, "a": 3.0}\n')
    news = polled(follower, first["cursor"])
    assert news["steps"] == [2, 3] and news["metrics"] == {"a": [22.5, 3.0]}


def test_a_file_that_is_replaced_cut_or_removed_begins_the_page_anew(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "a": float(step)}) + "\n" for step in range(1, 5)]
    file.write_text("".join(lines))
    follower = RunFollower(tmp_path)
    cursor = polled(follower)["cursor"]
    other = tmp_path / "other"
    other.write_text("".join(lines[:2]) + '{"step": 9, "a": 9.0}\n' * 3)
    os.replace(other, file)  # as a resumed run does
    news = polled(follower, cursor)
    assert news["reset"] and news["steps"] == [1, 2, 9]
    file.write_text(lines[0])
    news = polled(follower, news["cursor"])
    assert news["reset"] and news["steps"] == [1]
    file.write_text(json.dumps({"step": 7, "b": 1.0}) + "\n" + "".join(lines))  # written anew, and longer
    news = polled(follower, news["cursor"])
    assert sorted(news["steps"]) == [1, 2, 3, 4, 7]
    file.unlink()
    news = polled(follower, news["cursor"])
    assert news["reset"] and news["steps"] == []


def test_a_cursor_of_another_server_gets_everything(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n')
    for cursor in ("", "ffffffff.7", "nonsense", polled(RunFollower(tmp_path))["cursor"]):
        answer = polled(RunFollower(tmp_path), cursor)
        assert answer["reset"] and answer["steps"] == [1]


def test_rollouts_of_a_step_come_once_and_again_when_they_change(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples")
    rows = [
        {"prompt": f"<|user|>\nWhat is {n}?<|end|>\nassistant", "score": n / 2, "uid": "1-0"} for n in (1, 2)
    ]
    writer.write(rows, 1)
    follower = RunFollower(tmp_path)
    first = polled(follower)
    (part,) = first["rollouts"]
    assert part["kind"] == "samples" and part["columns"]["score"] == [0.5, 1.0]
    assert part["columns"]["prompt"] == ["What is 1?", "What is 2?"]
    assert len(set(part["columns"]["key"])) == 2 and "response" not in part["columns"]
    writer.write(rows[:1], 2)
    news = polled(follower, first["cursor"])
    assert [(part["step"], part["total"]) for part in news["rollouts"]] == [(2, 1)]
    (tmp_path / "samples" / "3.jsonl").write_text('{"score": 1.0}\n{"sco')
    broken = polled(follower, news["cursor"])
    assert broken["rollouts"][0]["columns"]["score"] == [1.0]
    assert "samples: 1 lines could not be read." in (broken["notes"])
    (tmp_path / "samples" / "3.jsonl").unlink()
    assert polled(follower, broken["cursor"])["reset"]


def test_all_rollouts_are_read_where_the_run_keeps_them(tmp_path: Path) -> None:
    SampleWriter(tmp_path / "elsewhere").write([{"response": "a", "row_id": 4}], 6)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"trainer: {{rollout_data_dir: {tmp_path / 'elsewhere'}}}\n")
    follower = RunFollower(run)
    (part,) = polled(follower)["rollouts"]
    assert (part["kind"], part["step"], part["columns"]["response"]) == ("rollout_data", 6, ["a"])
    assert follower.trajectory("rollout_data", 6, 0)["rows"] == [{"step": 6, "response": "a", "row_id": 4}]


def test_the_table_has_the_newest_rollouts_where_there_are_too_many(tmp_path: Path) -> None:
    half = MAX_ROLLOUTS // 2 + 1
    lines = [{"step": step, "score": [0.0] * half} for step in (1, 2)]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = polled(RunFollower(tmp_path))
    assert [part["step"] for part in answer["rollouts"]] == [2]
    assert "The table has the newest rollouts, from step 2 on." in answer["notes"]
    more = "".join(json.dumps({**lines[0], "step": step}) + "\n" for step in (3, 4, 5))
    with (tmp_path / "rollouts.jsonl").open("a") as file:
        file.write(more)
    follower = RunFollower(tmp_path)
    assert [part["step"] for part in polled(follower)["rollouts"]] == [5]
    assert [step for step, line in follower.recorded.by_step.items() if line] == [3, 4, 5], (
        "old ones are let go"
    )


def test_a_trajectory_has_all_its_rows_and_no_other(tmp_path: Path) -> None:
    medium = {
        "kind": "image",
        "placeholder": "<pad>",
        "tokens": 1,
        "digest": "d",
        "picture": "data:image/png;",
    }
    rows = [
        {"trajectory_id": 5},
        {"trajectory_id": 6, "media": [medium, {**medium, "digest": "e"}]},
        {"trajectory_id": 5, "lineage": 1, "media": [medium]},
    ]
    SampleWriter(tmp_path / "samples").write(rows, 1)
    follower = RunFollower(tmp_path)
    found = follower.trajectory("samples", 1, 2)
    assert [row.get("lineage") for row in found["rows"]] == [None, 1]
    assert found["pictures"] == {"d": "data:image/png;"}, "a file has a picture once, in another row perhaps"
    for kind, step, index in (("samples", 1, 3), ("samples", 8, 0), ("../samples", 1, 0)):
        assert follower.trajectory(kind, step, index)["rows"] == []


def test_advice_names_keys_with_their_values_and_says_since_when(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("actor_rollout_ref: {rollout: {n: 4}}\n")
    with build_trackers("jsonl", tmp_path) as trackers:
        for step in range(1, 9):
            trackers.log({"training/zero_variance_groups": 0.75 if step > 2 else 0.0}, step)
        follower = RunFollower(tmp_path)
        first = polled(follower)
        (entry,) = first["advice"]
        assert entry["rule"] == "zero_variance" and entry["now"] and not entry["hint"]
        assert (entry["first"], entry["last"], entry["steps"]) == (5, 8, 4), "the median of five steps"
        assert {"key": "actor_rollout_ref.rollout.n", "value": "4"} in entry["keys"]
        cursor = first["cursor"]
        for step in range(9, 13):
            trackers.log({"training/zero_variance_groups": 0.0}, step)
            news = polled(follower, cursor)
            cursor = news["cursor"]
        (entry,) = news["advice"]
    assert not entry["now"] and entry["last"] == 10
    anew = polled(RunFollower(tmp_path))["advice"]
    assert anew == news["advice"], "step by step or at once, the rules find the same"


def test_advice_of_a_validation_that_comes_late_is_that_of_one_in_time(tmp_path: Path) -> None:
    scores = {0: 0.5, 6: 0.7, 12: 0.7, 18: 0.3}
    pages = []
    for late in (0, 3):
        run = tmp_path / str(late)
        with build_trackers("jsonl", run) as trackers:
            follower = RunFollower(run)
            for step in range(25 + late):
                if 0 < step < 25:
                    trackers.log({"critic/score/mean": 0.4 if step < 12 else 0.8}, step)
                if step - late in scores:
                    trackers.log({"val-core/task/acc/mean@1": scores[step - late]}, step - late)
                pages.append(polled(follower)["advice"])
    in_time, beside = pages[24], pages[-1]
    assert [(entry["rule"], entry["first"]) for entry in in_time] == [("hacking", 18)]
    assert beside == in_time


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "a": NaN}\n')
    (tmp_path / "secret.jsonl").write_text('{"step": 1}\n')
    serving = LiveServer([tmp_path / "run", tmp_path / "later"])
    thread = threading.Thread(target=serving.serve, daemon=True)
    thread.start()
    yield serving
    serving.close()
    thread.join()


def get(server: LiveServer, target: str, **headers: str) -> tuple[int, str, Any]:
    """Return status, text and headers."""
    base = server.url.partition("/?")[0]
    request = urllib.request.Request(base + target, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode(), answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), error.headers


def test_the_page_and_its_data_need_the_token(server: LiveServer) -> None:
    right = {"Authorization": f"Bearer {server.token}"}
    for target in ("/", "/?token=", "/?token=wrong", "/changes?run=0", f"/?token={server.token[:-1]}"):
        status, text, _ = get(server, target)
        assert status == 403 and "token" in text and server.token not in text
    assert get(server, "/changes?run=0", Authorization="Bearer \u00e9")[0] == 403
    status, page, headers = get(server, f"/?token={server.token}")
    assert status == 200 and '"live":2' in page and server.token not in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy
    assert headers["Referrer-Policy"] == "no-referrer" and headers["Cache-Control"] == "no-store"
    status, text, _ = get(server, "/changes?run=0", **right)
    assert status == 200 and json.loads(text)["metrics"] == {"a": ["NaN"]}
    assert json.loads(get(server, "/changes?run=1", **right)[1])["steps"] == [], "a run that is not there"


def test_the_server_answers_on_this_machine_to_its_own_name_only(server: LiveServer) -> None:
    assert server._http.server_address[0] == "127.0.0.1"
    right = {"Authorization": f"Bearer {server.token}"}
    assert get(server, "/changes?run=0", Host="evil.example:80", **right)[0] == 403
    port = server._http.server_port
    assert get(server, "/changes?run=0", Host=f"localhost:{port}", **right)[0] == 200


@pytest.mark.parametrize(
    "target",
    [
        "/changes?run=2",
        "/changes?run=-1",
        "/changes?run=../secret",
        "/changes",
        "/trajectory?run=0&kind=samples&step=../../secret&index=0",
        "/trajectory?run=0&kind=samples&step=%C2%B2&index=0",
    ],
)
def test_a_request_names_nothing_but_numbers(server: LiveServer, target: str) -> None:
    assert get(server, target, Authorization=f"Bearer {server.token}")[0] == 400


def test_paths_lead_nowhere(server: LiveServer) -> None:
    right = {"Authorization": f"Bearer {server.token}"}
    assert get(server, "/trajectory?run=0&kind=..&step=1&index=0", **right)[1] == '{"rows":[],"pictures":{}}'
    for target in ("/../secret.jsonl", "/%2e%2e/secret.jsonl", "/metrics.jsonl", "//etc/passwd?run=0"):
        assert get(server, target, **right)[0] in (400, 404)
    request = urllib.request.Request(server.url, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=60)
