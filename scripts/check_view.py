"""Look at the page of a run of 10,000 rollouts in a real browser, and write benchmarks/results/view.md.

    python scripts/check_view.py --browser /usr/bin/chromium

made-up run ──LiveServer──► browser: five pages, light and dark; complaints, requests, processor time of the
main thread, news of a run that writes, a walk by keyboard, names for a screen reader ──► results, pictures

The browser's path may also stand in CHROMIUM. It ends with status 1 where something does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

from view_browser import HEIGHT, WIDTH, Browser
from view_run import ROWS, MadeUpRun

from hybridflow.observability.machine import cpu_model
from hybridflow.observability.report import LiveServer, write_report

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "view.md"
PICTURES = ROOT / "docs" / "images"
PAGES = ("overview", "rollouts", "trajectory", "timeline", "compare")
STEPS = 125
NEW_STEPS = 5
ROLLOUTS = STEPS * ROWS
TIMES = 9
MOST_MS = 100.0
MOST_PICTURE = 80_000

SEARCH = "const box = document.querySelector('#page-rollouts input[type=search]'); box.value = {}; "
SEARCH += "box.dispatchEvent(new Event('input'))"
HEADING = "document.querySelectorAll('#page-rollouts .table:not([hidden]) th button')[{}].click()"
TABLE = "PAGES.rollouts.rollouts.node"
OPEN = "document.querySelector('.strips')?.remove(); "
OPEN += "PAGES.rollouts.rollouts.open([...RUN.rollouts.values()].filter((row) => row.has_tokens)[{}])"
LONG = """
const filled = (make) => Array.from({ length: 2048 }, (_, index) => make(index));
const wave = filled((index) => -Math.abs(Math.sin(index)));
const tokens = { text: filled((index) => ` w${index}`), rollout_log_probs: wave, old_log_probs: wave,
  advantages: wave, entropys: wave, policy_version: filled((index) => index >> 9),
  response_mask: filled(() => 1) };
PAGES.trajectory.fill({ step: 1 }, { rows: [{ prompt: "long", tokens }], pictures: {} }, "");
"""
INTERACTIONS = {
    "open the overview": ("overview", "location.hash = '#/overview'", "#/rollouts"),
    "open the rollouts": ("rollouts", "location.hash = '#/rollouts'", "#/overview"),
    "open the timeline": ("timeline", "location.hash = '#/timeline'", "#/overview"),
    "open the comparison": ("compare", "location.hash = '#/compare'", "#/overview"),
    "open a trajectory": ("trajectory", "", "#/rollouts"),
    "filter by text": ("rollouts", f"{{ {SEARCH.format(repr('is 1'))} }}", "#/rollouts"),
    "take the filter away": ("rollouts", f"{{ {SEARCH.format(repr(''))} }}", "#/rollouts"),
    "groups with equal scores only, on or off": (
        "rollouts",
        "document.querySelector('#page-rollouts input[type=checkbox]').click()",
        "#/rollouts",
    ),
    "sort by score": ("rollouts", HEADING.format(2), "#/rollouts"),
    "sort by prompt": ("rollouts", HEADING.format(7), "#/rollouts"),
    "scroll the table": (
        "rollouts",
        f"{TABLE}.scrollTop = ({TABLE}.scrollTop + 70000) % 280000",
        "#/rollouts",
    ),
    "show a response of 2,048 tokens": ("trajectory", f"{{ {LONG} }}", "#/trajectory"),
    "go to the next token": (
        "trajectory",
        "document.querySelector('.strips')"
        ".dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowRight' }))",
        "#/trajectory",
    ),
    "smooth the curves": (
        "overview",
        "PAGES.overview.slider.value = 0.95 - PAGES.overview.slider.value; "
        "PAGES.overview.slider.dispatchEvent(new Event('input'))",
        "#/overview",
    ),
}
"""What a person does: the page that it ends on, the script, and where it begins."""


def main() -> int:
    """Check the page, and write the results."""
    parser = argparse.ArgumentParser(description="Look at the page of a run in a real browser.")
    parser.add_argument("--browser", default=os.environ.get("CHROMIUM", "/usr/bin/chromium"))
    options = parser.parse_args()
    checks: list[tuple[str, bool, str]] = []

    def check(name: str, holds: bool, found: str) -> None:
        checks.append((name, holds, found))
        print(f"{'ok  ' if holds else 'FAIL'} {name}: {found}", flush=True)

    with tempfile.TemporaryDirectory() as folder, made_up(Path(folder)) as (run, other):
        server = LiveServer([run.folder, other.folder])
        threading.Thread(target=server.serve, daemon=True).start()
        with Browser(options.browser) as browser:
            version = browser.version
            look(browser, server, check)
            times = interactions(browser, check)
            walk(browser, server, check)
            screen_reader(browser, check)
            news = live(browser, run, check)
            quiet(browser, urlsplit(server.url).netloc, check)
        server.close()
        one_file(options.browser, run.folder, other.folder, check)
    write_result(version, checks, times, news)
    return int(not all(holds for _, holds, _ in checks))


Check = Callable[[str, bool, str], None]


@contextmanager
def made_up(folder: Path) -> Iterator[tuple[MadeUpRun, MadeUpRun]]:
    """Write two runs; one has all rollouts, and the other a fifth of them."""
    other = MadeUpRun(folder / "other", "baseline", 0.0, seed=1)
    other.write(1, STEPS // 5)
    other.close()
    run = MadeUpRun(folder / "run", "curriculum", 0.1)
    run.write(1, STEPS)
    yield run, other
    run.close()


def look(browser: Browser, server: LiveServer, check: Check) -> None:
    """Open all pages in light and in dark, and keep a picture of each."""
    inks = set()
    for scheme in ("light", "dark"):
        begun = time.perf_counter()
        browser.open(server.url, dark=scheme == "dark")
        browser.wait_for(f"RUN.rollouts.size === {ROLLOUTS} && OTHER.steps.length > 0")
        seconds = time.perf_counter() - begun
        check(
            f"{ROLLOUTS:,} rollouts are there, {scheme}", True, f"{seconds:.1f} s after the page was opened"
        )
        inks.add(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        for page in PAGES:
            at = page
            if page == "trajectory":
                at += f"/train/{STEPS}/" + browser.evaluate(
                    "PAGES.rollouts.rollouts.rows.at(-80).id.split('/')[2]"
                )
            browser.evaluate(f"location.hash = '#/{at}'")
            browser.settle()
            if page == "trajectory":
                browser.wait_for("document.querySelector('.strips') !== null")
                browser.evaluate("document.querySelector('.strips').scrollIntoView({ block: 'end' })")
            browser.settle()
            shown = browser.evaluate(f"document.getElementById('page-{page}').innerText.length")
            title = browser.evaluate("document.title")
            check(f"{page}, {scheme}", shown > 100, f"{shown} characters, “{title}”")
            picture = PICTURES / f"view_{page}_{scheme}.png"
            browser.picture(picture)
            size = picture.stat().st_size
            check(f"its picture, {scheme}", size <= MOST_PICTURE, f"{picture.name}, {size / 1000:.0f} kB")
    check("light and dark differ", len(inks) == 2, " and ".join(sorted(inks)))


def interactions(browser: Browser, check: Check) -> dict[str, tuple[float, float]]:
    """Do what a person does, and measure the processor time of the main thread."""
    times = {}
    for name, (page, script, begin) in INTERACTIONS.items():
        found = []
        for number in range(TIMES):
            browser.evaluate(f"location.hash = '{begin}'")
            browser.wait_for(f"current === '{begin.removeprefix('#/')}'")
            if name == "open a trajectory":  # another one each time, whose rows are asked for
                script = OPEN.format(number)
            until = f"current === '{page}'"
            if page == "trajectory":
                until += " && document.querySelector('.strips') !== null"
            found.append(1000 * browser.busy(script, until))
        times[name] = (median(found), max(found))
        told = f"median {median(found):.0f} ms, at most {max(found):.0f} ms of {TIMES}"
        check(name, median(found) < MOST_MS, told)
    return times


def walk(browser: Browser, server: LiveServer, check: Check) -> None:
    """Go through the page without a pointer."""
    browser.open(server.url)
    browser.wait_for(f"RUN.rollouts.size === {ROLLOUTS}")

    def tab_to(selector: str, most: int = 60) -> int:
        for number in range(1, most + 1):
            browser.press("Tab")
            if browser.evaluate(f"document.activeElement.matches({selector!r})"):
                return number
        return 0

    browser.press("Tab")
    check(
        "the first Tab is a way to the content",
        browser.evaluate("document.activeElement.className") == "skip",
        "a link",
    )
    check("Tab reaches the pages", tab_to("#to-rollouts") > 0, "the link to the rollouts has the focus")
    browser.press("Enter")
    browser.wait_for("current === 'rollouts'")
    check("Enter opens a page", True, browser.evaluate("document.title"))
    tabs = tab_to("#page-rollouts .table")
    check("Tab reaches the table", tabs > 0, f"{tabs} times Tab")
    for key in ("ArrowDown", "ArrowDown", "PageDown", "End", "Home", "ArrowDown"):
        browser.press(key)
    chosen = browser.evaluate(
        f"{TABLE}.querySelector('tr[aria-selected=true]').getAttribute('aria-rowindex')"
    )
    said = browser.evaluate("document.getElementById('said').textContent")
    check(
        "arrow keys, End and Home move in it",
        chosen == "3" and "score" in said,
        f"row {chosen}: “{said[:60]}…”",
    )
    browser.press("Enter")
    browser.wait_for("current === 'trajectory' && document.querySelector('.strips') !== null")
    check("Enter opens a trajectory", True, browser.evaluate("location.hash"))
    tabs = tab_to("#page-trajectory .strips")
    for _ in range(3):
        browser.press("ArrowRight")
    token = browser.evaluate("document.querySelector('.strips').getAttribute('aria-valuenow')")
    text = browser.evaluate("document.querySelector('.strips').getAttribute('aria-valuetext')")
    check(
        "arrow keys move along its tokens",
        token == "3" and "version" in text,
        f"{tabs} times Tab; “{text[:70]}…”",
    )
    browser.press("Tab", shift=True)
    visible = browser.evaluate("document.activeElement !== document.body")
    check("Shift-Tab goes back", visible, browser.evaluate("document.activeElement.tagName"))


def screen_reader(browser: Browser, check: Check) -> None:
    """See whether everything that can be used has a name."""
    wanted = {
        "button",
        "link",
        "textbox",
        "searchbox",
        "combobox",
        "spinbutton",
        "checkbox",
        "slider",
        "img",
        "image",
    }
    for page in PAGES:
        browser.evaluate(f"location.hash = '#/{page}'")
        browser.settle()
        nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
        used = [node for node in nodes if not node["ignored"] and node.get("role", {}).get("value") in wanted]
        nameless = [node["role"]["value"] for node in used if not node.get("name", {}).get("value")]
        check(
            f"{page}: controls and pictures have names",
            bool(used) and not nameless,
            f"{len(used)} named, {len(nameless)} not",
        )


def live(browser: Browser, run: MadeUpRun, check: Check) -> dict[str, float]:
    """Write further steps while the page is open."""
    browser.evaluate("location.hash = '#/overview'")
    browser.settle()
    delays = []
    busy = []
    for step in range(STEPS + 1, STEPS + NEW_STEPS + 1):
        before = browser.task_seconds()
        run.write(step, step)
        begun = time.perf_counter()
        browser.wait_for(f"RUN.steps.at(-1) === {step} && RUN.rollouts.size === {step * ROWS}")
        browser.settle()
        delays.append(time.perf_counter() - begun)
        busy.append(1000 * (browser.task_seconds() - before))
    status = browser.evaluate("document.getElementById('status').textContent")
    check(
        "a run that writes is followed",
        True,
        f"{NEW_STEPS} steps, each on the page after {median(delays):.1f} s (median)",
    )
    check("the page says that it is live", f"live, step {STEPS + NEW_STEPS}" in status, f"“{status}”")
    check("news of a step", median(busy) < MOST_MS, f"median {median(busy):.0f} ms of the main thread")
    return {"delay": median(delays), "busy": median(busy)}


def quiet(browser: Browser, origin: str, check: Check) -> None:
    """See that the page has complained of nothing, and has asked nobody else."""
    asked = [url for url in browser.requests if not url.startswith("data:")]
    foreign = [url for url in asked if urlsplit(url).netloc != origin]
    check(
        "the console is empty", not browser.complaints, str(browser.complaints[:3] or "no error, no warning")
    )
    check(
        "no request leaves the page's origin", not foreign, f"{len(asked)} requests, {len(foreign)} foreign"
    )
    # what is planted has to be found, or the two lines above say nothing
    browser.evaluate("console.error('planted')")
    browser.evaluate("fetch('http://localhost:9/').catch(() => 0)")
    browser.settle()
    planted = " ".join(browser.complaints)
    seen = "planted" in planted and "Content Security Policy" in planted
    told = f"{len(browser.complaints)} complaints"
    check("a planted error is seen, and a planted request is stopped", seen, told)


def one_file(browser_path: str, run: Path, other: Path, check: Check) -> None:
    """Open the page as one file."""
    file = write_report(run, against=other)
    with Browser(browser_path) as browser:
        browser.open(file.as_uri())
        for page in PAGES:
            browser.evaluate(f"location.hash = '#/{page}'")
            browser.settle()
        count = browser.evaluate("RUN.rollouts.size")
        check(
            "the file has the same rollouts",
            count == ROLLOUTS + NEW_STEPS * ROWS,
            f"{count:,}, {file.stat().st_size / 1e6:.1f} MB",
        )
        asked = [url for url in browser.requests if not url.startswith(("data:", "file:"))]
        check(
            "the file asks for nothing",
            not asked and not browser.complaints,
            str(browser.complaints[:3] or "no request, no error"),
        )


def write_result(
    version: str,
    checks: list[tuple[str, bool, str]],
    times: dict[str, tuple[float, float]],
    news: dict[str, float],
) -> None:
    """Write the page of results."""
    held = sum(holds for _, holds, _ in checks)
    lines = [
        "# The page of a run in a real browser",
        "",
        "<!-- Written by scripts/check_view.py; do not edit. -->",
        "",
        f"A made-up run of {STEPS} steps and {ROLLOUTS:,} rollouts, beside one of a fifth of that, in "
        f"{version} without a window ({WIDTH} × {HEIGHT}) on {cpu_model()}. "
        f"{held} of {len(checks)} checks held.",
        "",
        f"Processor time of the page's main thread from the deed to its picture, {TIMES} times each:",
        "",
        "| what a person does | median, ms | most, ms |",
        "|---|---|---|",
        *(f"| {name} | {middle:.0f} | {most:.0f} |" for name, (middle, most) in times.items()),
        f"| nothing: a step of {ROWS} rollouts comes in | {news['busy']:.0f} | |",
        "",
        "| check | | found |",
        "|---|---|---|",
        *(f"| {name} | {'held' if holds else '**failed**'} | {found} |" for name, holds, found in checks),
    ]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
