"""The page's own script, run by node with a stand-in for the browser, where node is installed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hybridflow.observability.report import collect, page
from hybridflow.observability.report.follow import WAITS_FILE
from hybridflow.observability.samples import SampleWriter
from hybridflow.observability.trackers import build_trackers

ASSETS = Path(page.__file__).parent / "assets"
BROWSER = """
class Node {
  constructor(tag) {
    const classes = new Set(), classList = {
      add: (name) => classes.add(name), remove: (name) => classes.delete(name),
      toggle: (name, on) => (on ? classes.add(name) : classes.delete(name)) };
    Object.assign(this, { tag, children: [], options: [], style: {}, dataset: {}, text: "", classList });
  }
  append(...nodes) { this.children.push(...nodes); if (this.tag === "select") this.options = this.children; }
  replaceChildren(...nodes) { this.children = []; this.append(...nodes); }
  set textContent(text) { this.children = []; this.text = text; }
  get textContent() {
    if (this.hidden) return "";
    return this.text + this.children.map((one) => one.textContent ?? String(one)).filter(Boolean).join("|");
  }
  setAttribute(name, value) { this[name] = value; }
  addEventListener() {} removeAttribute() {} focus() {} remove() {} contains() { return false; }
  querySelector() { return null; } querySelectorAll() { return []; }
  getContext() { return new Proxy({}, { get: () => () => ({ width: 10 }), set: () => true }); }
  get clientWidth() { return 400; }
}
const byId = {}, nowhere = { addEventListener() {} };
globalThis.document = { ...nowhere,
  getElementById: (id) => (byId[id] ??= new Node()),
  createElement: (tag) => new Node(tag), createElementNS: (_, tag) => new Node(tag),
  documentElement: new Node(),
};
globalThis.addEventListener = globalThis.scrollTo = () => {};
globalThis.devicePixelRatio = 1;
globalThis.location = { hash: process.argv[2], search: "" };
globalThis.matchMedia = () => ({ matches: false, ...nowhere });
globalThis.getComputedStyle = () => ({ getPropertyValue: () => "" });
globalThis.ResizeObserver = class { observe() {} };
globalThis.CSS = { escape: (text) => text };
byId.data = new Node();
byId.data.text = process.argv[1];
"""
PRINT = """
setTimeout(() => {
  const texts = (id) => (byId[id]?.children ?? []).map((one) => one.textContent);
  console.log(JSON.stringify({
    tiles: texts("tiles"), subtitle: byId.subtitle.textContent, notes: texts("notes"),
    cards: texts("curves"), shown: byId[`page-${current}`].textContent,
    rows: PAGES.rollouts.rollouts.rows.map((row) => row.id),
    given: nodesOf(byId["page-trajectory"], "token given").map((one) => one.textContent),
    pictures: nodesOf(byId["page-trajectory"], "medium").map((one) => [one.alt, one.src]),
    result: RESULT,
  }));
}, 0);
function nodesOf(node, name) {
  if (node?.className === name) return [node];
  return (node?.children ?? []).flatMap((one) => nodesOf(one, name));
}
"""


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def shown(
    run: Path, at: str = "#/overview", result: str = "null", against: Path | None = None
) -> dict[str, Any]:
    """Return the texts of the page of a run folder at a route, and the value of an expression there."""
    source = "\n".join([BROWSER, *((ASSETS / name).read_text() for name in page.SCRIPTS), PRINT])
    source = source.replace('"use strict";', "").replace("RESULT", result)
    data = collect(run)
    if against is not None:
        data["other"] = collect(against)
    command = ["node", "-e", source, json.dumps(data), at]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@needs_node
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
    told = shown(tmp_path)
    assert told["notes"][0] == "the first trajectory that failed by environment|ValueError: <b>"
    tiles = told["tiles"]
    assert tiles[0].startswith("greedy accuracy, before → after") and "+0.4" in tiles[0]
    assert tiles[1] == "held-out questions|8"
    assert tiles[2] == "time of reinforcement learning|1 min 02 s"
    assert not [tile for tile in tiles if "processor" in tile] and "a processor, 1 thread" in told["subtitle"]
    (validation,) = [tile for tile in tiles if "acc/mean@1" in tile]
    assert validation.endswith("|0.25"), "one point is no change"
    (reward,) = [tile for tile in tiles if tile.startswith("reward mean")]
    assert reward.endswith("|0.5|+0.25")
    cards = told["cards"]
    (rewards,) = [card for card in cards if card.startswith("Reward, mean")]
    assert "rewards" in rewards and "score" not in rewards, "two curves with the same values are one"
    assert not [card for card in cards if card.startswith("Clipped")], "a curve of zeros takes no place"
    assert [card for card in cards if card.startswith("Truncated")]


HEAD = "A mean step takes 4 s (of 3 steps after the first)."
WAIT = {
    "cause": "few_rows",
    "seconds": 3.0,
    "text": "an engine has <b> to generate",
    "key": "rollout.max_num_seqs",
    "value": 64,
    "saved": 2.0,
    "also": ["x.y=1"],
    "overrides": ["rollout.max_num_seqs=64", "x.y=1"],
}


@needs_node
@pytest.mark.parametrize(
    ("waits", "told"),
    [
        (None, ""),
        ({"waits": "of another program"}, ""),
        (
            {"seconds": 4.0, "steps": 3, "waits": [WAIT]},
            f"{HEAD}|few rows| 3 s of a step, forecast to save 2 s, 50 % of a step|an engine has <b> to "
            "generate|try: |rollout.max_num_seqs=64|x.y=1",
        ),
        (
            {"seconds": 4.0, "steps": 3, "waits": [{**WAIT, "saved": None}]},
            f"{HEAD}|few rows| 3 s of a step, no forecast|an engine has <b> to generate|key: "
            "|rollout.max_num_seqs",
        ),
        (
            {"seconds": 4.0, "steps": 3, "waits": []},
            f"{HEAD} Nothing stands out: no wait is worth a key.",
        ),
    ],
)
def test_the_page_shows_where_the_time_goes_as_the_run_has_written_it(
    waits: Any, told: str, tmp_path: Path
) -> None:
    if waits is not None:
        (tmp_path / WAITS_FILE).write_text(json.dumps(waits))
    parts = '[byId["waits-head"], byId["waits"]].map((one) => one.textContent).filter(Boolean).join("|")'
    result = f'byId["waits-section"].hidden ? "" : {parts}'
    assert shown(tmp_path, result=result)["result"] == told


@needs_node
def test_the_cards_of_a_machine_stand_before_its_processor(tmp_path: Path) -> None:
    facts = {"card": "H100", "cards": 8, "cpu": "a processor", "threads": 1, "torch": "2"}
    (tmp_path / "machine.json").write_text(json.dumps(facts))
    assert shown(tmp_path)["subtitle"] == "8 × H100, a processor, 1 thread, torch 2"


@needs_node
def test_a_run_without_a_step_shows_its_failure_its_keys_and_its_log(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {project_name: p, experiment_name: e}\n")
    (tmp_path / "log.txt").write_text("x" * 40_000 + "\nthe last line <b>\n")
    failure = {
        "error": "TrainingError",
        "message": "it <b>broke",
        "steps_done": 0,
        "traceback": "in f",
        "at": "now",
    }
    (tmp_path / "failure.json").write_text(json.dumps(failure))
    told = shown(tmp_path, result="[byId.failure.textContent, byId.config.textContent, byId.log.textContent]")
    head, config, log = told["result"]
    assert head == "The run has failed after 0 steps: TrainingError|it <b>broke|traceback, now|in f"
    assert "experiment_name: e" in config and log == "the last line <b>\n"
    (tmp_path / "failure.json").write_text("{torn")
    assert shown(tmp_path, result="byId.failure.textContent")["result"] == ""


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


@needs_node
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
    told = shown(tmp_path)
    assert "failed trajectories|6: 3 deadline, 3 environment" in told["tiles"]
    cards = [card.split("|")[0] for card in told["cards"]]
    assert {"Turns of a trajectory", "Failed trajectories, by cause"} <= set(cards)
    told = shown(tmp_path, "#/rollouts", "tableOf(RUN).groups.map(({ count, mean }) => [count, mean])")
    assert told["result"] == [[2, 0.5]], "a trajectory of two rows is one sample"
    assert "3 of 3 rollouts" in told["shown"] and "1 groups" in told["shown"]
    told = shown(tmp_path, f"#/trajectory/{told['rows'][1]}")
    text = told["shown"]
    assert '⚙ add({"a": 1, "b": 1})' in text and "tool add|2" in text
    assert "2 messages, 1 by the policy, 1 tool calls" in text
    assert "row 1 of 2" in text and "row 2 of 2" in text and text.count("What is 1 + 1?") == 2
    assert told["given"] == ["b", "b"], "tokens that the policy did not sample are dimmed"


@needs_node
def test_a_run_of_single_turns_shows_nothing_of_agents(tmp_path: Path) -> None:
    row = {"prompt": "1+1=", "response": "ab", "score": 1.0, "uid": "1-0", "num_tokens": 2}
    SampleWriter(tmp_path / "samples").write([row], 1)
    told = shown(tmp_path, "#/trajectory")
    assert told["tiles"] == []
    assert "prompt|1+1=|response|ab" in told["shown"] and "conversation" not in told["shown"]


@needs_node
def test_filters_orders_and_groups(tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples")
    for step in (1, 2):
        rows = [
            {
                "uid": f"{step}-{n // 2}",
                "row_id": n,
                "score": n / 4,
                "num_tokens": 10 - n,
                "response": "x" * n,
            }
            for n in range(4)
        ]
        rows[1]["score"] = 0.0
        rows[3]["finish_reason"] = "length"
        writer.write(rows, step)
    filters: dict[str, Any] = {
        "steps": {"step": "2"},
        "scores": {"low": "0.5"},
        "lengths": {"shortest": "8", "longest": "9"},
        "finish": {"finish": "length"},
        "text": {"text": "XX"},
        "equal": {"equal": True, "step": "1"},
        "group": {"uid": "2-1"},
        "validation": {"kind": "validation"},
    }
    cases = ", ".join(f"{name}: {json.dumps(one)}" for name, one in filters.items())
    told = shown(
        tmp_path,
        "#/rollouts",
        f"Object.fromEntries(Object.entries({{ {cases} }}).map(([name, one]) => [name, "
        "tableOf(RUN).rows.filter(matcher({ ...NO_FILTER, ...one })).map((row) => row.id.slice(6))]))",
    )
    assert told["result"] == {
        "steps": ["2/0", "2/1", "2/2", "2/3"],
        "scores": ["1/2", "1/3", "2/2", "2/3"],
        "lengths": ["1/1", "1/2", "2/1", "2/2"],
        "finish": ["1/3", "2/3"],
        "text": ["1/2", "1/3", "2/2", "2/3"],
        "equal": ["1/0", "1/1"],
        "group": ["2/2", "2/3"],
        "validation": [],
    }
    assert "in 2 of them (50 %) all scores are equal" in told["shown"]
    order = shown(
        tmp_path, "#/rollouts", 'sorted([{ a: 2 }, { a: null }, { a: "x" }, { a: 10 }], (row) => row.a)'
    )
    assert [row["a"] for row in order["result"]] == [2, 10, "x", None], "numbers by size, nothing last"


@needs_node
def test_news_go_into_what_the_page_has(tmp_path: Path) -> None:
    with build_trackers("jsonl", tmp_path) as trackers:
        trackers.log({"a": 1.0}, 1)
    base = {"cursor": "e.2", "reset": False, "about": {}, "timeline": [], "rollouts": []}
    more = [
        {**base, "steps": [3], "metrics": {"b": [7.0]}},
        {**base, "steps": [2, 3], "metrics": {"a": [5.0, 6.0]}},
        {**base, "steps": [], "metrics": {}, "rollouts": [part(1, ["x"], [1.0])]},
        {**base, "steps": [], "metrics": {}, "rollouts": [part(1, ["x", "y"], [1.0, 0.0])]},
    ]
    calls = (
        f"[...{json.dumps(more)}.map((one) => merge(RUN, one)), RUN.steps, RUN.metrics, RUN.rollouts.size]"
    )
    told = shown(tmp_path, "#/overview", calls)
    *merged, steps, metrics, rollouts = told["result"]
    assert steps == [1, 2, 3] and metrics == {"a": [1.0, 5.0, 6.0], "b": [None, None, 7.0]}
    assert merged == [True, True, True, False] and rollouts == 1, "rows that may be others are asked for anew"


def part(step: int, uids: list[str], scores: list[float]) -> dict[str, Any]:
    return {"kind": "samples", "step": step, "columns": {"uid": uids, "score": scores}}


@needs_node
def test_two_runs_are_compared_by_step_and_by_prompt(tmp_path: Path) -> None:
    for name, scores in (("here", [0.0, 1.0, 1.0]), ("there", [0.0, 0.0, 0.5])):
        with build_trackers("jsonl", tmp_path / name) as trackers:
            trackers.log({"critic/rewards/mean": scores[1]}, len(name))
        prompts = ["same", "same", f"only {name}"]
        rows = [
            {"prompt": prompt, "response": "r", "score": score, "uid": f"1-{prompt}"}
            for prompt, score in zip(prompts, scores, strict=True)
        ]
        SampleWriter(tmp_path / name / "samples").write(rows, 1)
    told = shown(
        tmp_path / "here",
        "#/compare",
        "[promptPairs(RUN, OTHER).map(({ row, ...pair }) => pair), "
        'bothCurves(RUN, OTHER, "critic/rewards/mean")]',
        tmp_path / "there",
    )
    (pair,), curves = told["result"]
    assert (pair["prompt"], pair["here"], pair["there"], pair["difference"]) == (
        "same",
        {"count": 2, "mean": 0.5},
        {"count": 2, "mean": 0.0},
        0.5,
    )
    assert curves == {"steps": [4, 5], "values": [[1.0, None], [None, 0.0]]}
    assert "1 prompts in common; 1 prompts are better here, 0 there" in told["shown"]
    alone = shown(tmp_path / "here", "#/compare")
    assert "--against" in alone["shown"]


@needs_node
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
    SampleWriter(tmp_path / "samples").write(rows, 1)
    told = shown(tmp_path, "#/trajectory/train/1/1")
    assert told["pictures"] == [["image 1 of 3, 16 tokens", url], ["image 2 of 3, 16 tokens", url]]
    assert "prompt|x|y|[image 3 of 3, 16 tokens, not kept]|z|response|2" in told["shown"]
    missing = "Pictures of samples that are named and not shown, as they did not fit: 1."
    assert missing in collect(tmp_path)["notes"]
    assert "digest" not in told["shown"]


def test_all_pictures_of_a_page_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MAX_PICTURES", 10)
    facts = {"kind": "image", "placeholder": "<pad>", "tokens": 1}
    rows = [{"media": [{**facts, "digest": name, "picture": "data:1234"}]} for name in "abab"]
    SampleWriter(tmp_path / "samples").write(rows, 1)
    assert collect(tmp_path)["pictures"] == {"a": "data:1234"}
