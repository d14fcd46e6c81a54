"""The page's own script, run by node with a stand-in for the browser, where node is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observability import report
from hybridflow.observability.report import collect
from hybridflow.observability.samples import SampleWriter
from hybridflow.observability.trackers import build_trackers

SCRIPTS = Path(report.__file__).parent
BROWSER = """
class Node {
  constructor() {
    const classes = [], classList = { add: (name) => classes.push(name) };
    Object.assign(this, { children: [], style: {}, dataset: {}, text: "", classes, classList });
  }
  append(...nodes) { this.children.push(...nodes); }
  prepend(...nodes) { this.children.unshift(...nodes); }
  replaceChildren(...nodes) { this.children = nodes; }
  set textContent(text) { this.children = []; this.text = text; }
  get textContent() {
    return this.text + this.children.map((one) => one.textContent ?? String(one)).join("|");
  }
  setAttribute(name, value) { this[name] = value; }
  addEventListener() {} remove() {}
  querySelector() { return null; } querySelectorAll() { return []; }
  getContext() { return { measureText: () => ({ width: 10 }) }; }
  get clientWidth() { return 400; }
}
const byId = {};
globalThis.document = {
  getElementById: (id) => (byId[id] ??= new Node()),
  createElement: () => new Node(),
  createElementNS: () => new Node(),
  addEventListener() {}, documentElement: new Node(),
};
globalThis.matchMedia = () => ({ matches: false, addEventListener() {} });
globalThis.ResizeObserver = class { observe() {} };
globalThis.CSS = { escape: (text) => text };
byId.data = new Node();
byId.data.text = process.argv[1];
"""
PRINT = """
console.log(JSON.stringify({
  tiles: byId.tiles.children.map((one) => one.textContent), subtitle: byId.subtitle.textContent,
  notes: (byId.notes?.children ?? []).map((one) => one.textContent),
  cards: (byId.curves?.children ?? []).map(
    (one) => one.children[0].children[0].textContent + ": " + one.children[1].textContent),
  list: (byId["sample-list"]?.children ?? []).map((one) => one.textContent),
  detail: (byId["sample-detail"]?.children ?? []).map((one) => one.textContent),
  pictures: nodesOf(byId["sample-detail"], "medium").map((one) => [one.alt, one.src]),
  given: tokensOf(byId["sample-detail"]).filter((one) => one.given).map((one) => one.text),
}));
function nodesOf(node, name) {
  if (node?.className === name) return [node];
  return (node?.children ?? []).flatMap((one) => nodesOf(one, name));
}
function tokensOf(node) {
  if (node?.className === "token") return [{ text: node.textContent, given: node.classes.includes("given") }];
  return (node?.children ?? []).flatMap(tokensOf);
}
"""


def shown(run: Path) -> dict[str, Any]:
    """Tiles, subtitle and cards (title and legend) of the page of a run folder."""
    source = "\n".join([BROWSER, *((SCRIPTS / name).read_text() for name in report.SCRIPTS), PRINT])
    data = json.dumps(collect(run))
    done = subprocess.run(
        ["node", "-e", source.replace('"use strict";', ""), data], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page: dict[str, Any] = json.loads(done.stdout)
    return page


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_tiles_and_cards_say_what_there_is_and_no_more(tmp_path: Path) -> None:
    with build_trackers("jsonl", tmp_path) as trackers:
        trackers.log({"val-core/sums/acc/mean@1": 0.25}, 0)
        for step, reward in ((1, 0.25), (2, 0.5)):
            same = {"critic/rewards/mean": reward, "critic/score/mean": reward}
            trackers.log(same | {"actor/pg_clipfrac": 0.0, "response_length/clip_ratio": 0.5}, step)
    (tmp_path / "summary.json").write_text(
        '{"greedy_before": 0.5, "greedy_after": 0.9, "num_questions": 8, "seconds_rl": 62.0, "cpu": "a '
        'processor"}'
    )
    (tmp_path / "machine.json").write_text('{"cpu": "a processor", "threads": 1, "torch": "2"}')
    (tmp_path / "failures.json").write_text('{"environment": "ValueError: <b>"}')
    page = shown(tmp_path)
    assert page["notes"][0] == "the first trajectory that failed by environment|ValueError: <b>"
    tiles = page["tiles"]
    assert tiles[0].startswith("greedy accuracy, before → after") and "+0.4" in tiles[0]
    assert tiles[1] == "held-out questions|8"
    assert tiles[2] == "time of reinforcement learning|1 min 02 s"
    assert not [tile for tile in tiles if "processor" in tile] and "a processor, 1 thread" in page["subtitle"]
    (validation,) = [tile for tile in tiles if "acc/mean@1" in tile]
    assert validation.endswith("|0.25"), "one point is no change"
    (reward,) = [tile for tile in tiles if tile.startswith("reward mean")]
    assert reward.endswith("|0.5|+0.25")
    cards = page["cards"]
    (rewards,) = [card for card in cards if card.startswith("Reward, mean")]
    assert "rewards" in rewards and "score" not in rewards, "two curves with the same values are one"
    assert not [card for card in cards if card.startswith("Clipped")], "a curve of zeros takes no place"
    assert [card for card in cards if card.startswith("Truncated")]


def agent_row(trajectory: int, lineage: int, score: float, **more: Any) -> dict[str, Any]:
    tokens = {"text": list("ab"), "response_mask": [1, 0], "rollout_log_probs": [-1.0, 0.0]}
    return {
        "prompt": "user\nWhat is 1 + 1?",
        "response": "ab",
        "num_tokens": 2,
        "score": score,
        "extra_info": {"num_turns": 2},
        "trajectory_id": trajectory,
        "lineage": lineage,
        "tokens": tokens,
        "uid": "1-0",
        **more,
    }


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_run_of_agents_shows_conversations_rows_and_failures(tmp_path: Path) -> None:
    with build_trackers("jsonl", tmp_path) as trackers:
        trackers.log({"training/num_failed/deadline": 2.0, "agent/num_turns/mean": 1.5}, 1)
        failed = {"training/num_failed/deadline": 1.0, "training/num_failed/environment": 3.0}
        trackers.log(failed | {"agent/num_turns/mean": 2.0, "agent/tools/tool_calls": 1.0}, 2)
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": 1}}}
    messages = [
        {"role": "assistant", "content": "I add.", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "2"},
    ]
    rows = [agent_row(5, 0, 1.0, messages=messages), agent_row(5, 1, 1.0), agent_row(6, 0, 0.0)]
    SampleWriter(tmp_path / "samples").write(rows, 1)
    page = shown(tmp_path)
    assert "failed trajectories|6: 3 deadline, 3 environment" in page["tiles"]
    cards = [card.split("|")[0] for card in page["cards"]]
    assert {"Turns of a trajectory", "Failed trajectories, by cause"} <= set(cards)
    head, first, second, _ = page["list"]
    assert head == "What is 1 + 1?|2 samples, mean reward 0.5", "a trajectory of two rows is one sample"
    assert "row 2" in second and "row 2" not in first
    detail = "\n".join(page["detail"])
    assert '⚙ add({"a": 1, "b": 1})' in detail and "tool add|2" in detail
    assert "2 rows of one trajectory" in detail and detail.count("What is 1 + 1?") == 2
    assert page["given"] == ["b", "b"], "tokens that the policy did not sample are dimmed"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_run_of_single_turns_shows_nothing_of_agents(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "response": "ab", "score": 1.0, "uid": "1-0", "num_tokens": 2}
    SampleWriter(tmp_path / "samples").write([row], 1)
    page = shown(tmp_path)
    assert page["list"][0] == "1+1=" and page["tiles"] == []
    assert page["detail"][1:3] == ["prompt", "1+1="] and len(page["detail"]) == 5


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_pictures_stand_in_their_places_in_the_prompt(tmp_path: Path) -> None:
    facts = {"kind": "image", "placeholder": "<pad>", "tokens": 16}
    first, second, third = ({**facts, "digest": name} for name in "abc")
    url = "data:image/png;base64,AAAA"
    rows = [
        {"prompt": "x<pad>y", "response": "1", "media": [{**first, "picture": url}]},
        {
            "prompt": "x<pad>y<pad><pad>z",
            "response": "2",
            "media": [first, {**second, "picture": url}, third],
        },
    ]
    SampleWriter(tmp_path / "samples").write(rows[1:] + rows[:1], 1)
    page = shown(tmp_path)
    assert page["pictures"] == [["image 1 of 3, 16 tokens", url], ["image 2 of 3, 16 tokens", url]]
    (prompt,) = [text for text in page["detail"] if text.startswith("x")]
    assert prompt == "x||y|||[image 3 of 3, 16 tokens, not kept]|z"
    assert (
        "Pictures of samples that are named and not shown, as they did not fit: 1."
        in collect(tmp_path)["notes"]
    )
    assert not [text for text in page["detail"] if "digest" in text]


def test_all_pictures_of_a_page_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_PICTURES", 10)
    facts = {"kind": "image", "placeholder": "<pad>", "tokens": 1}
    rows = [{"media": [{**facts, "digest": name, "picture": "data:1234"}]} for name in "abab"]
    SampleWriter(tmp_path / "samples").write(rows, 1)
    assert collect(tmp_path)["pictures"] == {"a": "data:1234"}
