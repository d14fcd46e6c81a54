"""How often do the built-in rewards err on their shipped cases, before and after a change, and what does a
verdict cost?

    python benchmarks/verifiers.py --before CHECKOUT        (three minutes of one quiet core)

CHECKOUT is a working copy of the commit to compare with (`git worktree add PATH 90ba191b`). Both sides are
asked in turn, in processes of their own, with one thread, and judge the cases of this checkout; their cost is
CPU seconds. Without `--before` the verdicts and the cost of the other side are those of the result that is
there. Then the hostile strings of the tests go through the reward's processes with a deadline. Writes
`benchmarks/results/verifiers.json` and `.md`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import side_by_side as kit

SIDE = "--side"
MOST = 1.3
"""What a verdict may cost, in what it cost before."""
DEADLINE = 30.0
"""Seconds that a hostile string may take: the default of reward.timeout."""
HOSTILE_TRUTHS = ("5.5", r"\{1, x^2+1, \pi\}")
ROOT = Path(__file__).parents[1]
COLUMNS = ("right_taken", "right_refused", "wrong_taken", "wrong_refused")


def be_a_side() -> None:
    """Answer lists of (response, ground truth) for a reward with its verdicts and CPU seconds."""
    kit.say({"ready": True})
    while True:
        reward, rows = kit.next_question()
        if reward == "code":
            kit.say({"taken": programs(rows), "seconds": 0.0})
            continue
        module = import_module(f"hybridflow.rewards.functions.{reward}")
        if hasattr(module, "prepare"):
            module.prepare()
        began = time.process_time()
        taken = [module.compute_score("x", text, truth)["acc"] == 1.0 for text, truth in rows]
        kit.say({"taken": taken, "seconds": time.process_time() - began})


def programs(rows: list[tuple[str, Any]]) -> list[bool]:
    """Return the verdicts on programs, which run in the sandbox of this machine."""
    from hybridflow.config.reward import RewardConfig
    from hybridflow.rewards.build import build_reward_manager
    from hybridflow.rewards.result import ScoreRequest

    with build_reward_manager(RewardConfig(function="code", num_workers=0), 0) as manager:
        outcomes = manager.outcomes([ScoreRequest("code", text, truth) for text, truth in rows])
    return [outcome.extras.get("acc") == 1.0 for outcome in outcomes]


def side(checkout: Path) -> kit.Side:
    """Start a side that imports the package of a checkout."""
    command = ["env", f"PYTHONPATH={checkout / 'src'}{os.pathsep}{ROOT / 'benchmarks'}"]
    made = kit.Side([*command, *kit.own_command(__file__, SIDE)], threads=1)
    made.answer()
    return made


def judge(checkouts: dict[str, Path], rounds: int) -> dict[str, Any]:
    """Return for each side and reward its counts by class, its wrong verdicts and its seconds."""
    from hybridflow.rewards.labelled import SHIPPED, JudgedCase, as_data, shipped_cases

    sides = {name: side(checkout) for name, checkout in checkouts.items()}
    found: dict[str, Any] = {name: {} for name in sides}
    for reward in SHIPPED:
        cases = [case for case in shipped_cases(reward) if case.right is not None]
        question = [reward, [(case.response, case.truth) for case in cases]]
        ways = {name: partial(one.ask, question) for name, one in sides.items()}
        answers = kit.in_turn(ways, 1 if reward == "code" else rounds, warm_up=0)
        for name, given in answers.items():
            verdicts = [
                JudgedCase(case, taken, 0.0) for case, taken in zip(cases, given[0]["taken"], strict=True)
            ]
            data = as_data(verdicts)
            found[name][reward] = {
                "all": data["all"],
                "classes": {kind: [counts[c] for c in COLUMNS] for kind, counts in data["classes"].items()},
                "misjudged": [one["place"] for one in data["misjudged"]],
                "seconds": [each["seconds"] * 1000 / len(cases) for each in given],
            }
    for one in sides.values():
        one.close()
    return found


def try_hostile_strings() -> dict[str, Any]:
    """Return what became of the hostile strings of the tests under a deadline."""
    sys.path.insert(0, str(ROOT / "tests" / "unit" / "rewards"))
    from test_rewards_verdicts import HOSTILE, REWARDS

    from hybridflow.config.reward import RewardConfig
    from hybridflow.rewards.build import build_reward_manager
    from hybridflow.rewards.result import ScoreRequest

    found: dict[str, Any] = {}
    for reward in ("math", "math_dapo", "gsm8k", "search_r1"):
        config = RewardConfig(function=reward, num_workers=1, timeout=DEADLINE)
        requests = [
            ScoreRequest("x", text, truth)
            for string in HOSTILE.values()
            for text in (string, REWARDS[reward][1].format(string))
            for truth in HOSTILE_TRUTHS
        ]
        with build_reward_manager(config, 0) as manager:
            outcomes = manager.outcomes(requests)
        found[reward] = {
            "strings": len(requests),
            "taken": sum(outcome.extras.get("acc") == 1.0 for outcome in outcomes),
            "failed": sum(bool(outcome.error) for outcome in outcomes),
            "slowest": max(outcome.seconds for outcome in outcomes),
        }
    return found


def rate(counts: dict[str, Any], name: str) -> str:
    """A rate in percent with its interval; a dash where no case could have it."""
    if f"rate_{name}" not in counts:
        return "-"
    found = counts[f"rate_{name}"]
    low, high = found["interval"]
    return f"{100 * found['rate']:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    sides = {"before": result["before"], "after": result["after"]}
    rows = []
    for reward in result["after"]:
        for name, found in sides.items():
            counts = found[reward]["all"]
            rates = [rate(counts, "right_refused"), rate(counts, "wrong_taken")]
            rows.append([reward, name, *(counts[column] for column in COLUMNS), *rates])
    head = ["reward", "side", *(column.replace("_", ", ") for column in COLUMNS)]
    texts = [
        f"Verdicts on the shipped cases, before ({result['commit']}) and after; rates with Wilson's\n"
        "interval of 95 %. A part of the cases were tests of the rule before, and the others were written\n"
        "to find what it gets wrong: they are no sample of what a policy answers. Undecided cases are not\n"
        "counted.",
        kit.table([*head, "right refused", "wrong taken"], rows),
        "CPU seconds for 1,000 verdicts, medians (fastest–slowest), one thread, both sides in turn:",
    ]
    rows = []
    goals = []
    for reward in result["after"]:
        seconds = [found[reward]["seconds"] for found in sides.values()]
        if reward == "code":
            continue
        rows.append(
            [reward, *(kit.spread(each, ".3f") for each in seconds), kit.ratio(seconds[1], seconds[0])]
        )
        cost = statistics.median(seconds[1]) / statistics.median(seconds[0])
        goals.append(f"- `{reward}`: {cost:.2f} × before, wanted at most {MOST}: {kit.verdict(cost <= MOST)}")
    texts += [kit.table(["reward", "before", "after", "ratio"], rows), kit.NOISE, "\n".join(goals)]
    rows = []
    for kind, counts in result["after"]["math"]["classes"].items():
        old = result["before"]["math"]["classes"][kind]
        if old != counts:
            rows.append([kind, *old[1:3], *counts[1:3]])
    head = ["class", "right refused before", "wrong taken before", "right refused", "wrong taken"]
    texts += ["Classes of `math` that changed:", kit.table(head, rows)]
    rows = [[reward, *found.values()] for reward, found in result["hostile"].items()]
    for row in rows:
        row[-1] = f"{row[-1]:.2f} s"
    texts += [
        "Hostile strings (deep nesting, towers of powers, 100,000 characters, and others of the tests),\n"
        f"bare and where the reward looks for an answer, with a deadline of {DEADLINE:g} s:",
        kit.table(["reward", "strings", "taken as right", "failed or timed out", "slowest"], rows),
    ]
    return "\n\n".join(texts)


def main() -> None:
    if SIDE in sys.argv:
        be_a_side()
    parser = kit.arguments(__doc__, rounds=5)
    parser.add_argument("--before", type=Path, help="working copy of the commit to compare with")
    options = parser.parse_args()
    if options.page:
        result = kit.committed("verifiers")
    else:
        checkouts = {"after": ROOT}
        if options.before:
            checkouts = {"before": options.before.resolve(), **checkouts}
        found = judge(checkouts, options.quick or options.rounds)
        if options.before:
            command = ["git", "-C", str(options.before), "rev-parse", "--short=8", "HEAD"]
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        else:
            earlier = kit.committed("verifiers")
            found["before"] = earlier["before"]
            commit = earlier["commit"]
        result = {**kit.facts(["math-verify", "sympy", "mpmath"], threads=1), "commit": commit, **found}
        result["hostile"] = try_hostile_strings()
    kit.write("verifiers", result, "How good the verifiers are", page(result), dry=options.quick)


if __name__ == "__main__":
    main()
