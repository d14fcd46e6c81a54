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
from hybridflow.observability.trackers import build_trackers

SCRIPTS = Path(report.__file__).parent
BROWSER = """
class Node {
  constructor() {
    Object.assign(this, { children: [], style: {}, dataset: {}, text: "", classList: { add() {} } });
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
  cards: byId.curves.children.map(
    (one) => one.children[0].children[0].textContent + ": " + one.children[1].textContent),
}));
"""


def shown(run: Path) -> dict[str, Any]:
    """Tiles, subtitle and cards (title and legend) of the page of a run folder."""
    files = ("report_charts.js", "report_samples.js", "report.js")
    source = "\n".join([BROWSER, *((SCRIPTS / name).read_text() for name in files), PRINT])
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
    page = shown(tmp_path)
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
