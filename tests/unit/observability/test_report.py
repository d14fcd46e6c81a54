from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hybridflow.errors import DataError
from hybridflow.observability.report import collect, write_report
from hybridflow.observability.report.follow import MAX_POINTS, RunFollower
from hybridflow.observability.report.page import MAX_ROWS, MAX_SAMPLE_STEPS, embed_json, evenly
from hybridflow.observability.report.rows import MAX_TEXT, MAX_TOKENS
from hybridflow.observability.samples import SampleWriter
from hybridflow.observability.trackers import build_trackers

NASTY = "</script><script>alert(1)</script><!-- {{DATA}} {{CSS}} & \u2028 \ud800"


class Page(HTMLParser):
    """The tags of a page and the text of its scripts, as a browser would split them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self._inside = tag == "script"
        if self._inside:
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = False

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data


def make_run(folder: Path) -> Path:
    with build_trackers("jsonl", folder) as trackers:
        trackers.log({"val-core/sums/acc/mean@1": 0.25}, 0)
        trackers.log({"critic/rewards/mean": 1 / 3, "actor/grad_norm": math.nan}, 1)
    row = {
        "uid": "a",
        "prompt": NASTY,
        "response": "4",
        "score": math.nan,
        "tokens": {"text": ["4", NASTY], "advantages": [1.0, math.inf]},
    }
    SampleWriter(folder / "samples").write([row], 1)
    (folder / "config.yaml").write_text("trainer: {project_name: p, experiment_name: e}\n")
    (folder / "summary.json").write_text('{"greedy_before": 0.5, "greedy_after": NaN}')
    return folder


def data_of(page: Page) -> dict[str, Any]:
    loaded = json.loads(page.scripts[0])
    assert isinstance(loaded, dict)
    return loaded


def test_page_names_the_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "machine.json").write_text('{"cpu": "a processor", "threads": 1, "torch": "2"}')
    assert collect(run)["machine"] == {"cpu": "a processor", "threads": 1, "torch": "2"}


def test_page_holds_everything_and_asks_nothing_of_the_network(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path / "run"), tmp_path / "out" / "r.html").read_text(encoding="utf-8")
    page = Page(text)
    assert len(page.scripts) == 2, "text of the run must not open or close a script"
    links = [value for _, name, value in page.attributes if name in ("src", "href", "action")]
    assert all(link.startswith("#") or link == "data:," for link in links), links
    (policy,) = [value for tag, name, value in page.attributes if tag == "meta" and "default-src" in value]
    assert "unsafe" not in policy and "connect-src" not in policy
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        body = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body[-1].encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy, f"the policy forbids the page's own {tag}"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    data = data_of(page)
    assert data["title"] == "p / e" and data["steps"] == [0, 1]
    assert data["metrics"] == {
        "actor/grad_norm": [None, "NaN"],
        "critic/rewards/mean": [None, 0.333333],
        "val-core/sums/acc/mean@1": [0.25, None],
    }
    assert data["summary"] == {"greedy_before": 0.5, "greedy_after": "NaN"}
    (step,) = data["rollouts"]
    assert (step["kind"], step["step"], step["columns"]["score"]) == ("samples", 1, ["NaN"])
    (row,) = data["details"]["samples/1"]
    assert row["prompt"] == NASTY and row["score"] == "NaN"
    assert row["tokens"] == {"text": ["4", NASTY], "advantages": [1.0, "Infinity"]}
    assert data["notes"] == [
        "No validation/*.jsonl in the run folder, so there are no validation samples to read."
    ]


def test_page_has_no_placeholder_left(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    assert "{{" not in write_report(tmp_path).read_text(encoding="utf-8")


def test_missing_parts_become_notes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    (tmp_path / "summary.json").write_text("{broken")
    (tmp_path / "config.yaml").write_text("a: [")
    data = collect(tmp_path)
    assert data["steps"] == [1] and data["title"] == tmp_path.name and len(data["notes"]) == 4


DEEP = "[" * 50_000
HALF_DEEP = "[" * 400 + "]" * 400
"""Read by Python's parser, and too deep for functions that call themselves."""
DIGITS = "1" + "0" * 400


@pytest.mark.parametrize(
    ("name", "line", "is_row"),
    [
        ("metrics.jsonl", DEEP, False),
        ("metrics.jsonl", '{"step": 2, "x": ' + HALF_DEEP + "}", False),
        ("metrics.jsonl", '{"step": 1e999}', False),
        ("metrics.jsonl", '{"step": -1e999, "x": 1}', False),
        ("metrics.jsonl", '{"step": ' + DIGITS + ', "x": 1}', False),
        ("metrics.jsonl", '{"step": ' + "9" * 5_000 + "}", False),
        ("metrics.jsonl", '{"step": [2]}', False),
        ("metrics.jsonl", "[2]", False),
        ("metrics.jsonl", '"step"', False),
        ("metrics.jsonl", '{"step": 2, "x": ' + DIGITS + ', "training/num_failed/a": "b"}', True),
        ("metrics.jsonl", '{"step": 2, "training/num_failed/a": NaN, "agent/num_retried/b": Infinity}', True),
        ("timeline.jsonl", '{"step": 2, "spans": 5}', True),
        (
            "timeline.jsonl",
            '{"step": 2, "spans": [["a", "b", 1, NaN], ["a", "b", 1, 1e999], [1, 2, 3, 4]]}',
            True,
        ),
        ("timeline.jsonl", DEEP, False),
        ("rollouts.jsonl", '{"step": 2, "uid": ' + HALF_DEEP + "}", False),
        ("samples/1.jsonl", DEEP, False),
        ("samples/1.jsonl", '{"prompt": "a", "x": ' + HALF_DEEP + "}", False),
        ("samples/1.jsonl", '{"prompt": "a", "score": {"a": 1}}', False),
        ("samples/1.jsonl", '{"tokens": {"text": 5}}', False),
        ("samples/1.jsonl", '{"messages": [5]}', False),
        ("samples/1.jsonl", '{"messages": [{"tool_calls": [5]}]}', False),
        ("samples/1.jsonl", '{"messages": [{"tool_calls": 5}]}', False),
        ("samples/1.jsonl", '{"media": [5]}', False),
        ("samples/1.jsonl", '{"prompt": "a", "media": null}', True),
        ("samples/1.jsonl", '{"media": [{"picture": "x"}]}', False),
        ("samples/1.jsonl", '{"prompt": 5, "messages": null, "score": ' + DIGITS + "}", True),
    ],
)
def test_a_line_that_cannot_be_shown_is_left_out_and_told(
    tmp_path: Path, name: str, line: str, is_row: bool
) -> None:
    run = make_run(tmp_path / "run")
    good = collect(run)
    with (run / name).open("a") as file:
        file.write(line + "\n")
    write_report(run)
    data = collect(run)
    told = [note for note in data["notes"] if note not in good["notes"]]
    assert told == ([] if is_row else [f"{name.partition('/')[0]}: 1 lines could not be read."])
    assert [row["prompt"] for row in data["details"]["samples/1"]][:1] == [NASTY]
    assert data["metrics"]["critic/rewards/mean"][:2] == [None, 0.333333]
    if not is_row:
        assert data["steps"] == good["steps"] and data["details"] == good["details"]


@pytest.mark.parametrize("name", ["summary.json", "failures.json", "config.yaml"])
def test_a_small_file_that_is_nested_too_deeply_is_told(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run")
    (run / name).write_text(DEEP)
    assert any(note.startswith(f"{name} could not be read") for note in collect(run)["notes"])


def test_a_file_whose_name_is_no_number_is_no_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "samples" / "².jsonl").write_text("{}")
    assert set(collect(run)["details"]) == {"samples/1"}
    follower = RunFollower(run)
    follower.poll()
    epoch = follower.changes()["cursor"].partition(".")[0]
    assert follower.changes(f"{epoch}.²")["metrics"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        write_report(tmp_path)
    for name, content in (("config.yaml", "a: 1"), ("log.txt", "a line"), ("failure.json", '{"error": "E"}')):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(content)
        assert write_report(folder).is_file()
    with pytest.raises(DataError, match="is no folder"):
        write_report(tmp_path / "missing")


def test_samples_are_capped_and_the_page_says_so(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples")
    for step in range(1, 101):
        writer.write([{"score": row} for row in range(MAX_ROWS + 2)], step)
    long = {"prompt": "x" * (MAX_TEXT + 1), "tokens": {"text": ["y"] * (MAX_TOKENS + 3)}}
    SampleWriter(tmp_path / "validation").write([long], 5)
    data = collect(tmp_path)
    whole = sorted(int(name.split("/")[1]) for name in data["details"] if name.startswith("samples/"))
    assert len(whole) == MAX_SAMPLE_STEPS and (whole[0], whole[-1]) == (1, 100)
    assert all(len(data["details"][f"samples/{step}"]) == MAX_ROWS for step in whole)
    in_table = [len(part["columns"]["score"]) for part in data["rollouts"] if part["kind"] == "samples"]
    assert in_table == [MAX_ROWS + 2] * 100, "the table has all rows"
    assert any("of 100 steps 20 have their texts whole" in note for note in data["notes"])
    assert any(f"first {MAX_ROWS} rows" in note for note in data["notes"])
    (row,) = data["details"]["validation/5"]
    assert row["tokens_cut"] == 3
    assert len(row["tokens"]["text"]) == MAX_TOKENS
    assert row["prompt"].endswith(f"{MAX_TEXT + 1} characters in all)")


def test_conversations_are_text_and_cut(tmp_path: Path) -> None:
    call = {"id": "a", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call, {"name": "sub", "arguments": "{}"}]},
        {"role": "tool", "name": "add", "content": [{"type": "image"}, {"type": "text", "text": NASTY}]},
        {"role": "user", "content": "x" * MAX_TEXT},
        {"role": "user", "content": "y"},
        {"role": "user", "content": "z"},
    ]
    SampleWriter(tmp_path / "samples").write([{"uid": "a", "messages": messages}], 1)
    shown = collect(tmp_path)["details"]["samples/1"][0]["messages"]
    assert shown[0] == {"role": "assistant", "content": "", "calls": ['add({"a": 1})', "sub({})"]}
    assert shown[1]["role"] == "tool add" and "alert(1)" in shown[1]["content"]
    assert shown[1]["content"].startswith("[image]")
    assert sum(len(message["content"]) for message in shown[:3]) < MAX_TEXT
    assert shown[3:] == [{"role": "…", "content": "2 more messages", "calls": []}]


def test_long_runs_are_thinned_but_keep_their_validations(tmp_path: Path) -> None:
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, MAX_POINTS + 1002):
            file.write(
                json.dumps({"step": step, "a": 1.0} | ({"val/loss": 2.0} if step == 500 else {})) + "\n"
            )
    data = collect(tmp_path)
    assert len(data["steps"]) <= MAX_POINTS and {1, 500, MAX_POINTS + 1001} <= set(data["steps"])
    assert any("one in 2" in note and f"of {MAX_POINTS + 1001} steps" in note for note in data["notes"])


def test_evenly_keeps_the_ends() -> None:
    assert evenly([1, 2, 3], 5) == [1, 2, 3]
    assert evenly(list(range(10)), 4) == [0, 3, 6, 9]


def test_embedded_json_reads_back() -> None:
    text = embed_json({"a": NASTY})
    assert not set("<>&\u2028") & set(text) and text.encode("utf-8") and json.loads(text) == {"a": NASTY}
