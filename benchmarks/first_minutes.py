"""Record what a GRPO run on a small real model shows in its first minutes, on a terminal and in a pipe.

    python benchmarks/first_minutes.py MODEL [--minutes 5] [--out benchmarks/results/first_minutes.md]

MODEL is a Hugging Face folder (SmolLM2-135M-Instruct in the committed result). The run's own words are
written down with the second in which they came; a moving status line counts as new when its text without the
clock and the spinner's sign is new, or when its clock has moved. Then the run is interrupted in each phase by
SIGTERM or Ctrl-C and started again.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

WIDTH = 110
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|\x1b[=>]")
SPINNER = re.compile("^[⠀-⣿] ?")
CLOCK = re.compile(r" · (\d+h )?(\d+m )?[\d.]+[smh]( · .* left)?$")
SHORT = (
    "data.max_response_length=8",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.rollout.exact=false",
    "actor_rollout_ref.actor.use_kl_loss=false",
)
"""Keys of the runs that are interrupted: short steps, one model."""
MOMENTS = (
    ("loading the model", "loading the model", signal.SIGTERM),
    ("generation", "generating", signal.SIGINT),
    ("update", "updating the actor", signal.SIGTERM),
    ("validation", "validating", signal.SIGINT),
    ("saving", "saving a checkpoint", signal.SIGTERM),
)
"""Name, words of the status line at which the signal is sent, signal."""


@dataclass
class Recording:
    """What a run has shown: each new text with its second."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    longest_silence: float = 0.0
    """Seconds between two new texts, a clock that moves among them."""
    status: int | None = None
    _last: float = 0.0
    _seen: str = ""
    _moved: str = ""

    def hear(self, now: float, text: str) -> None:
        """Take a text that the run has just shown."""
        if text == self._moved:
            return
        self._moved = text
        self.longest_silence = max(self.longest_silence, now - self._last)
        self._last = now
        still = CLOCK.sub("", text)
        if still != self._seen:
            self._seen = still
            self.lines.append((now, text))


def command(model: str, run: Path, *more: str) -> list[str]:
    """The run: 4 prompts of 4 responses a step, each of at most 64 tokens."""
    return [
        str(Path(sys.executable).with_name("hybridflow")),
        "train",
        "--recipe=grpo",
        f"actor_rollout_ref.model.path={model}",
        "data.task.name=arithmetic_chain",
        "data.task.size=64",
        "data.task.val_size=4",
        "data.train_batch_size=4",
        "data.max_prompt_length=96",
        "data.max_response_length=64",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512",
        "actor_rollout_ref.rollout.n=4",
        "reward.function=arithmetic_chain",
        "trainer.total_training_steps=8",
        "trainer.save_freq=2",
        "trainer.test_freq=1",
        "trainer.val_before_train=false",
        "trainer.logger=[console]",
        f"trainer.default_local_dir={run}",
        *more,
    ]


def watch(
    arguments: list[str], *, terminal: bool, seconds: float, at: str = "", number: int = 0
) -> Recording:
    """Run for some seconds, then end it by SIGTERM; or send `number` once the words `at` are shown."""
    found = Recording()
    environment = os.environ | {"COLUMNS": str(WIDTH), "TERM": "xterm-256color"}
    reader, writer = pty.openpty() if terminal else os.pipe()
    start = time.monotonic()
    process = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, env=environment
    )
    os.close(writer)
    sent = False
    for now, text in texts(reader, start):
        if text:
            found.hear(now, text)
        due = at in text if at else now > seconds
        if due and not sent:
            sent = True
            process.send_signal(number or signal.SIGTERM)
            name = signal.Signals(number or signal.SIGTERM).name
            found.lines.append((now, f"--- {name} is sent ---"))
    found.status = process.wait()
    return found


def texts(reader: int, start: float) -> Iterator[tuple[float, str]]:
    """The lines that come, and every half second an empty one; ends with the process."""
    left = ""
    while True:
        ready, _, _ = select.select([reader], [], [], 0.5)
        now = time.monotonic() - start
        if not ready:
            yield now, ""
            continue
        try:
            data = os.read(reader, 1 << 16)
        except OSError:  # the terminal's other end is closed
            data = b""
        if not data:
            return
        pieces = re.split(r"[\r\n]+", left + ESCAPES.sub("", data.decode(errors="replace")))
        # the status line ends without a line break
        left = "" if SPINNER.match(pieces[-1]) else pieces.pop()
        for piece in pieces:
            text = SPINNER.sub("", piece).strip()
            if text:
                yield now, text


def _words(text: str) -> str:
    """Return a text without its counts and times."""
    return re.sub(r"\d+/\d+", "#", CLOCK.sub("", re.sub(r"^\d\d:\d\d:\d\d ", "", text)))


def shown(recording: Recording) -> list[str]:
    """The recording as text, the count of a phase only where it begins and where it ends."""
    kept: list[tuple[float, str]] = []
    for now, text in recording.lines:
        if len(kept) > 1 and all(_words(each) == _words(text) for _, each in kept[-2:]):
            kept[-1] = (now, text)
        else:
            kept.append((now, text))
    return [f"{now:6.1f} s  {text[:WIDTH]}" for now, text in kept]


def introduction(model: str, minutes: float) -> list[str]:
    """What was done, on what."""
    return [
        "# The first minutes of a run, and its end by a signal",
        "",
        f"Made by `python benchmarks/first_minutes.py MODEL --minutes {minutes:g}` with {Path(model).name} "
        f"on {os.cpu_count()} cores at a load average of {os.getloadavg()[0]:.0f}. Where other work shared "
        "the cores, a silence is an upper bound. Of texts that differ in a count only, the first and the "
        "last are kept.",
        "",
    ]


def first_minutes(model: str, minutes: float, folder: Path) -> list[str]:
    """Recordings of two runs, one on a terminal and one in a pipe."""
    parts = []
    for name, terminal in (("a terminal", True), ("a pipe", False)):
        run = folder / name.split()[1]
        found = watch(command(model, run), terminal=terminal, seconds=60 * minutes)
        parts += [
            f"## The first {minutes:g} minutes on {name}",
            "",
            f"Longest time without anything new to read: {found.longest_silence:.1f} s.",
            "",
            "```text",
            *shown(found),
            f"exit status {found.status}",
            "```",
            "",
        ]
        print("\n".join(parts), flush=True)
    return parts


def interrupted(model: str, folder: Path) -> list[str]:
    """The ends of runs that a signal reached in each phase, and what the same command does afterwards."""
    parts = []
    for name, words, number in MOMENTS:
        run = folder / name.replace(" ", "_")
        found = watch(command(model, run, *SHORT), terminal=True, seconds=0.0, at=words, number=number)
        left = sorted(path.name for path in run.glob(".tmp_*"))
        again = watch(command(model, run, *SHORT), terminal=True, seconds=0.0, at="generating")
        resumed = [text for _, text in again.lines if "resumed after" in text or "generating" in text]
        parts += [
            f"## {signal.Signals(number).name} during {name}",
            "",
            "```text",
            *shown(found)[-6:],
            f"exit status {found.status}; temporary folders left: {left or 'none'}",
            *(f"started again: {text[:WIDTH]}" for text in resumed[:2]),
            "```",
            "",
        ]
        print("\n".join(parts), flush=True)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--part", choices=["all", "first", "signals"], default="all")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "first_minutes.md")
    options = parser.parse_args()
    parts = introduction(options.model, options.minutes)
    with tempfile.TemporaryDirectory() as folder:
        if options.part != "signals":
            parts += first_minutes(options.model, options.minutes, Path(folder))
        if options.part != "first":
            parts += interrupted(options.model, Path(folder))
    options.out.write_text("\n".join(parts))


if __name__ == "__main__":
    main()
