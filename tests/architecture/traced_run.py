"""A GRPO run of three steps on one process that writes down which of our own functions it enters, as JSON.

    python traced_run.py FILE

FILE gets `ways`: for each measure of `TARGETS` the different call stacks from the command to its function, in
the order of the run, as lists of (file, name, lines of the definition); and `step`: the (file, name) of all
functions that the second step entered, from its beginning to that of the third.

The tests read it from a process of its own, so that nothing which other tests have cached is left out.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "src" / "hybridflow"
COMMAND = ("trainer/main.py", "command.main")
"""Where a way begins: what turns errors into a status stands before it."""
TARGETS = {
    "generation": ("rollout/native/sampling.py", "sample"),
    "reward": ("rewards/functions/arithmetic_chain.py", "compute_score"),
    "loss": ("algorithms/policy_losses/vanilla.py", "vanilla"),
}
STEP = ("trainer/trainer.py", "Trainer._train_step")
"""What the loop calls once for each step, generation and update together."""
HANDED_OVER = ("rollout/engine_replica.py", "EngineReplica.resume")
"""What starts the thread that steps an engine: the way of what is done there begins with the way to this."""
POLLING = {"progress"}
"""Names of threads that only look at the clock: how often they do depends on the machine's load."""
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""No calls to a reader; some of them are none to newer Pythons either."""
Place = tuple[str, str]


class Recorder:
    """Profile function of all threads: the ways to the targets, and what the second step enters."""

    def __init__(self) -> None:
        self.ways: dict[str, dict[tuple[tuple[str, str, int], ...], None]] = {name: {} for name in TARGETS}
        self.step = 0
        self.entered: set[tuple[str, str, int]] = set()
        self._places: dict[CodeType, Place | None] = {}
        self._to_thread: tuple[tuple[str, str, int], ...] = ()
        self._measures = {place: name for name, place in TARGETS.items()}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        place = self._place(frame.f_code)
        if place is None:
            return
        if place == STEP:
            self.step += 1
        if self.step == 2 and threading.current_thread().name not in POLLING:
            self.entered.add((*place, frame.f_code.co_firstlineno))
        if place == HANDED_OVER:
            self._to_thread = self._way(frame)
        if place in self._measures:
            way = self._way(frame)
            if way[0][:2] != COMMAND and threading.current_thread().name.startswith("rollout "):
                way = self._to_thread + way
            self.ways[self._measures[place]][way] = None

    def _place(self, code: CodeType) -> Place | None:
        """Return the file and the name of a function of our own; None for others, modules and classes."""
        if code not in self._places:
            self._places[code] = None
            path = Path(code.co_filename)
            if PACKAGE in path.parents and code.co_flags & 0x02:  # CO_NEWLOCALS, which modules have not
                name = code.co_qualname.replace(".<locals>", "")
                self._places[code] = (path.relative_to(PACKAGE).as_posix(), name)
        return self._places[code]

    def _way(self, innermost: FrameType) -> tuple[tuple[str, str, int], ...]:
        found: list[tuple[str, str, int]] = []
        frame: FrameType | None = innermost
        while frame is not None:
            place = self._place(frame.f_code)
            if place is not None and not place[1].endswith(COMPREHENSIONS):
                lines = {line for _, _, line in frame.f_code.co_lines() if line}
                found.append((*place, max(lines) - min(lines) + 1))
            frame = frame.f_back
        return tuple(found[::-1])


def keys(model: Path, out: Path) -> list[str]:
    """Return the words of the run: the tiny GRPO recipe, made smaller."""
    return [
        "--config-name=tiny/grpo",
        f"actor_rollout_ref.model.path={model}",
        "data.task.size=64",
        "data.task.val_size=0",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "reward.num_workers=0",
        "trainer.controller=local",
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",  # the console leaves lines out by the clock
        "trainer.total_training_steps=3",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        f"trainer.default_local_dir={out}",
    ]


def main() -> None:
    from hybridflow.models.tiny import create_tiny_model
    from hybridflow.trainer.main_ppo import main as command

    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        model = create_tiny_model(Path(folder, "tiny"), hidden=32, intermediate=64, heads=2, kv_heads=1)
        threading.setprofile(recorder)
        sys.setprofile(recorder)
        status = command(keys(model, Path(folder, "run")))
        sys.setprofile(None)
        threading.setprofile(None)
    if status:
        raise SystemExit(status)
    ways = {name: list(found) for name, found in recorder.ways.items()}
    Path(sys.argv[1]).write_text(json.dumps({"ways": ways, "step": sorted(recorder.entered)}))


if __name__ == "__main__":
    main()
