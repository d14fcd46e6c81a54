"""Kill worker processes of runs of agents under Ray within their episodes, and compare.

    python tests/e2e/episode_losses.py [--schedule NAME ...]

Each attempt goes on with the episodes that the last one has begun: each call has to be carried out once, and
be the one that a run in one process without a kill has made; in exact mode scores, losses
and the last checkpoint have to be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path

from episode_kills import IGNORED, Trial
from kill_resume import differences
from ray_runs import OF_EACH_PROCESS, OWN_POOL, under_ray
from tiny_run import write_inputs

WORLD = Path(__file__).with_name("losing_world.py")
"""Not imported here, since it changes how the process that imports it reads a model's calls."""
COLLECTOR = (*OWN_POOL, "trainer.num_collectors=1")
SCHEDULES = {
    "exact_async": ([(40, "generate"), (140, "train"), (330, "generate")], OWN_POOL),
    "sync": ([(40, "generate"), (140, "train"), (240, "collectors")], COLLECTOR),
}
"""The processes that are lost, each when so many of the run's 576 calls have been made; and what the run has.
In the second one a collector plays the episodes.
"""


def lose(trial: Trial, schedule: str) -> list[str]:
    """Run once by a schedule, with its losses, and return what is wrong."""
    plan, layout = SCHEDULES[schedule]
    out = trial.folder / "losing"
    log = trial.prepare(out)
    overrides = trial.arguments(
        out,
        *layout,
        "trainer.controller=ray",
        f"trainer.max_restarts={len(plan)}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path='{WORLD}'",
    )
    done = under_ray(log, [json.dumps(plan), *overrides], module="losing_world").wait()
    killed = re.findall(r"^killed (\w+) \d+$", done.output, re.MULTILINE)
    anew = done.output.count("the workers are built anew")
    if done.returncode or killed != [pool for _, pool in plan] or anew != len(plan):
        return [f"it ended with {done.returncode}, {killed} killed, built anew {anew}: {done.output[-3000:]}"]
    ignored = (*IGNORED, *OF_EACH_PROCESS, "reward/")
    found = differences(out, trial.reference, ignored, last_files_without=("data/",))
    if not trial.survived(out)["continued"]:
        found.append("no episode went on by its journal")
    return [*found, *trial.wrong_calls(out)]


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each run; 1 where any differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedule", choices=list(SCHEDULES), nargs="*", default=list(SCHEDULES))
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        inputs = write_inputs(Path(temporary) / "inputs")
        for schedule in parser.parse_args(arguments).schedule:
            found = lose(Trial(inputs, Path(temporary) / schedule, schedule), schedule)
            failed += bool(found)
            print(f"{schedule:12} {'WRONG: ' + '; '.join(found[:4]) if found else 'right'}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
