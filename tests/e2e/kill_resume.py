"""Kill a run with SIGKILL at chosen moments, start it again, and compare it bit for bit with one that was
never stopped.

    python tests/e2e/kill_resume.py [--algorithm ppo|grpo|agents|ahead|all] [--moment NAME ...] [--random N]

Each run is a child forked from one process that has imported everything and run nothing. The moment of the
kill is set in the child: before or after a certain call of a certain function in step KILL_STEP. `--random N`
kills at random times, up to N times in one run. Compared are all metrics of all steps (timings aside) and the
digests of all files of the last checkpoint.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import echo_world
from tiny_run import Inputs, metrics_of, small_run, write_inputs

from hybridflow.checkpoint.manifest import read_manifest
from hybridflow.trainer.main_ppo import main as main_ppo

STEPS = 6
SAVE_EVERY = 2
KILL_STEP = 4
"""Three steps to an epoch, so that the data position, too, is somewhere inside one."""


@dataclass(frozen=True)
class Moment:
    """SIGKILL before (or after) call number `call` of `target` within step KILL_STEP; the next run goes on
    after step `resumes`.
    """

    target: str  # module:attribute[.attribute]
    call: int = 1
    after: bool = False
    resumes: int = KILL_STEP - SAVE_EVERY


STORE = "hybridflow.checkpoint.store"
MOMENTS = {
    "rollout": Moment("hybridflow.rollout.native.session:Session.step", call=5),
    "update": Moment("hybridflow.engines.optimizer:MasterAdamW.step", call=2, after=True),
    "save, some roles written": Moment("hybridflow.checkpoint.sharded:write_tensors", after=True),
    "save, states of the driver written": Moment(f"{STORE}:save_tree", call=2, after=True),
    "reward": Moment("hybridflow.rewards.manager:RewardSession.result"),
    "update, in the backward": Moment("hybridflow.engines.optimizer:MasterAdamW.gradient_norm"),
    "save, before the manifest": Moment(f"{STORE}:write_manifest"),
    "save, before the rename": Moment(f"{STORE}:sync_tree", after=True),
    "save, after the rename": Moment(f"{STORE}:replace_file", resumes=KILL_STEP),
    "save, before the rotation": Moment(f"{STORE}:CheckpointStore._rotate", resumes=KILL_STEP),
    "save, in the rotation": Moment(f"{STORE}:CheckpointStore._set_aside", after=True, resumes=KILL_STEP),
    "validation": Moment("hybridflow.trainer.ppo.validation:Validator.__call__"),
    "after the save": Moment("hybridflow.trainer.state:RunState.save", after=True, resumes=KILL_STEP),
    "end of the step": Moment(
        "hybridflow.trainer.trainer:Trainer._train_step", after=True, resumes=KILL_STEP
    ),
}
ALGORITHMS = {
    "ppo": (
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.05",
        "algorithm.kl_ctrl.horizon=50",
        "algorithm.kl_ctrl.target_kl=0.01",
    ),
    "grpo": (
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
    ),
    "agents": (*echo_world.KEYS, "actor_rollout_ref.rollout.exact=true"),
    "ahead": (
        "algorithm.adv_estimator=grpo",
        "algorithm.rollout_correction.rollout_is=token",
        "trainer.schedule=exact_async",
        "trainer.async.run_ahead=2",
    ),
}
SHARED = (
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.lr_warmup_steps=3",
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.8",
    "trainer.test_freq=2",
    f"trainer.save_freq={SAVE_EVERY}",
    "trainer.max_ckpt_to_keep=1",
)


def install(moment: Moment) -> None:
    """Make this process kill itself at that moment."""
    calls = {"step": 0, "seen": 0}

    def count_step(inner: Callable[..., Any]) -> Callable[..., Any]:
        def one(self: Any, step: int) -> Any:
            calls.update(step=step, seen=0)
            return inner(self, step)

        return one

    def bomb(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls["seen"] += calls["step"] == KILL_STEP
            due = calls["step"] == KILL_STEP and calls["seen"] == moment.call
            if due and not moment.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = inner(*args, **kwargs)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    _replace(moment.target, bomb)
    _replace("hybridflow.trainer.trainer:Trainer._train_step", count_step)


def _replace(target: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    setattr(owner, name, wrap(getattr(owner, name)))


def start(arguments: list[str], log: Path, install: Callable[[], None] | None = None) -> int:
    """Fork a child that runs `main_ppo` after `install`; gives its process id."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if install is not None:
            install()
        status = main_ppo(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(child: int) -> int:
    """Exit status of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def differences(
    run: Path, reference: Path, ignored: tuple[str, ...] = (), *, last_files_without: tuple[str, ...] = ()
) -> list[str]:
    """Return the differences between two finished runs, without metrics whose names begin with `ignored` and
    files of the last checkpoint whose names begin with `last_files_without`.
    """
    found = []
    got = metrics_of(run)
    wanted = metrics_of(reference)
    if sorted(got) != sorted(wanted):
        found.append(f"steps {sorted(got)}, wanted {sorted(wanted)}")
    for step in sorted(set(got) & set(wanted)):
        for name in sorted(set(got[step]) | set(wanted[step])):
            mine = got[step].get(name)
            other = wanted[step].get(name)
            if repr(mine) != repr(other) and not name.startswith(ignored):
                found.append(f"step {step} {name}: {mine!r}, wanted {other!r}")
    last = f"global_step_{STEPS}"
    if (run / last).is_dir():
        files = read_manifest(run / last).files
        others = read_manifest(reference / last).files
        found += [
            f"{last}/{name} differs"
            for name in sorted(set(files) | set(others))
            if files.get(name) != others.get(name) and not name.startswith(last_files_without)
        ]
    else:
        found.append(f"no {last}")
    return found


class Trial:
    """The runs of one algorithm in one folder."""

    def __init__(self, algorithm: str, inputs: Inputs, folder: Path) -> None:
        self.algorithm = algorithm
        self.ignored = echo_world.OF_THE_WAY if algorithm == "agents" else ()
        self.inputs = inputs
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.reference = folder / "uninterrupted"
        started = time.monotonic()
        status = wait(start(self.arguments(self.reference), folder / "uninterrupted.log"))
        self.seconds = time.monotonic() - started
        assert status == 0, (
            f"the uninterrupted run ended with {status}:\n{(folder / 'uninterrupted.log').read_text()}"
        )

    def arguments(self, out: Path) -> list[str]:
        """The command of a run."""
        keys = (f"data.val_files={self.inputs.val}", *SHARED, *ALGORITHMS[self.algorithm])
        return small_run(self.inputs, out, *keys, steps=STEPS)

    def kill_at(self, name: str) -> list[str]:
        """Kill at a moment, resume, compare; what went wrong."""
        out = self.folder / name.replace(" ", "_").replace(",", "")
        log = out.with_suffix(".log")
        killed = wait(start(self.arguments(out), log, partial(install, MOMENTS[name])))
        if killed != -signal.SIGKILL:
            return [f"not killed but ended with {killed}"]
        before = metrics_of(out, with_timings=True)
        if max(before) not in (KILL_STEP - 1, KILL_STEP):
            return [f"killed after step {max(before)}, wanted in step {KILL_STEP}"]
        found = self._finish(out, log)
        after = metrics_of(out, with_timings=True)
        # a step done again has other timings
        kept = max((step for step in before if after.get(step) == before[step]), default=0)
        return (
            found
            if kept == MOMENTS[name].resumes
            else [*found, f"resumed after step {kept}, wanted {MOMENTS[name].resumes}"]
        )

    def kill_at_random(self, times: int, seed: int) -> tuple[list[str], int]:
        """Kill again and again at random times until the run ends by itself or was killed `times` times; what
        went wrong, and kills.
        """
        draw = random.Random(seed)
        kills = 0
        out = self.folder / f"random_{seed}"
        log = out.with_suffix(".log")
        while kills < times:
            child = start(self.arguments(out), log)
            time.sleep(draw.uniform(0.2, 0.8) * self.seconds)
            os.kill(child, signal.SIGKILL)
            status = wait(child)
            if status != -signal.SIGKILL:
                return (self._compared(out) if status == 0 else [f"ended with {status}"]), kills
            kills += 1
        return self._finish(out, log), kills

    def _finish(self, out: Path, log: Path) -> list[str]:
        status = wait(start(self.arguments(out), log))
        if status != 0:
            return [f"the resumed run ended with {status}: {log.read_text()[-500:]}"]
        return self._compared(out)

    def _compared(self, out: Path) -> list[str]:
        # the ledger in `data/` also has the lines of what was undone
        without = ("data/",) if self.algorithm == "ahead" else ()
        return differences(out, self.reference, self.ignored, last_files_without=without)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each kill; 1 where any resumed run differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=[*ALGORITHMS, "all"], default="all")
    parser.add_argument("--moment", choices=list(MOMENTS), nargs="*", default=list(MOMENTS))
    parser.add_argument(
        "--random", type=int, default=10, metavar="N", help="then kill up to N times at random times (0: no)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    options = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory() as temporary:
        inputs = write_inputs(Path(temporary) / "inputs")
        for algorithm in ALGORITHMS if options.algorithm == "all" else [options.algorithm]:
            trial = Trial(algorithm, inputs, Path(temporary) / algorithm)
            num_values = sum(len(values) for values in metrics_of(trial.reference).values())
            results = [(name, trial.kill_at(name)) for name in options.moment]
            if options.random:
                found, kills = trial.kill_at_random(options.random, options.seed)
                results.append((f"{kills} times at random", found))
            for name, found in results:
                failed += bool(found)
                equal = f"equal: {num_values} values of {STEPS} steps, last checkpoint"
                verdict = f"DIFFERS: {'; '.join(found[:5])}" if found else equal
                print(f"{algorithm:5} killed: {name:28} {verdict}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
