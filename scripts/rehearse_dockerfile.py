"""Run the steps of a Dockerfile one by one where no builder can be had, and then its command.

    sudo python scripts/rehearse_dockerfile.py docker/Dockerfile.cpu [--python /usr/bin/python3.11]
        [--run "hybridflow demo"] [--record FILE]

Each stage is a layer over this machine's own root (an overlay mount in a mount namespace of its own), so that
no step changes the machine, and all is gone at the end. One thing that a builder does is not done: the base
image is not pulled. In its place stands this machine's system, with what it has installed, and an empty
environment of the Python that is named, so that every Python package comes from the steps. FROM, WORKDIR,
COPY, RUN, ARG, ENV, USER and CMD are known; a step that fails ends the rehearsal with its status. `--record`
writes the steps, their seconds, and the last lines that they print.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

HOME = "/environment"
"""Where the environment that stands for the image's Python is, in a stage."""
SHOWN = 3
"""Last lines of a step that the record has."""
RECORD = """Written by scripts/rehearse_dockerfile.py; do not edit. No container was built: each stage is
a layer over this machine's own root, with what that has installed (g++ among it), and an empty environment of
its Python in the place of the base image.
"""


@dataclass
class Stage:
    """One stage: its root, and what ENV, ARG, USER and WORKDIR have set."""

    root: Path
    variables: dict[str, str]
    user: str = "0"
    folder: str = "/"
    command: list[str] = field(default_factory=list)

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command in the stage, as its user, in its working folder."""
        (self.root / self.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        inside = f"cd {shlex.quote(self.folder)} && exec {shlex.join(words)}"
        identity = ["--userspec", f"{self.user}:{self.user}"] if self.user != "0" else []
        return subprocess.run(
            ["chroot", *identity, str(self.root), "/bin/sh", "-c", inside],
            env={**self.variables, "PATH": f"{HOME}/bin:{os.environ['PATH']}", "HOME": "/tmp"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their words; comments are left out and lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in joined.splitlines() if line.strip()]


def open_stage(work: Path, python: str) -> Stage:
    """Mount a layer over this machine's root, with an empty environment of `python`."""
    parts = {name: work / name for name in ("upper", "work", "root")}
    for part in parts.values():
        part.mkdir(parents=True)
    options = f"lowerdir=/,upperdir={parts['upper']},workdir={parts['work']}"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(parts["root"])], check=True)
    for kind in ("proc", "dev"):
        subprocess.run(["mount", "--rbind", f"/{kind}", str(parts["root"] / kind)], check=True)
    users = parts["root"] / "etc" / "passwd"  # a base image has no ordinary ones
    lines = users.read_text().splitlines(keepends=True)
    users.write_text("".join(line for line in lines if not 1000 <= int(line.split(":")[2]) < 60_000))
    for folder in Path(python).resolve().parents:  # which an ordinary user of an image may enter
        there = parts["root"] / folder.relative_to("/")
        there.chmod(there.stat().st_mode | 0o011)
    variables = {
        name: value for name, value in os.environ.items() if name.startswith(("PIP_", "LANG", "SSL_"))
    }
    stage = Stage(parts["root"], variables)
    made = stage.run([python, "-m", "venv", HOME])
    assert made.returncode == 0, made.stdout
    return stage


def copy(
    stage: Stage,
    words: list[str],
    context: Path,
    stages: dict[str, Stage],
    ignored: list[str],
    sent: set[str],
) -> str:
    """Copy files of the context, of which only `sent` are there, or of another stage, as COPY does."""
    source = context
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    if source == context:
        names = [name for name in names if name.removeprefix("./") in sent]
    to = stage.root / (Path(stage.folder) / target).as_posix().lstrip("/")
    found = [path for name in names for path in sorted(source.glob(name.lstrip("/").removeprefix("./")))]
    if len(found) < len(words) - 1:
        raise SystemExit(
            f"COPY {' '.join(words)}: not all of it is in {source}, or .dockerignore leaves it out"
        )

    def left_out(folder: str, entries: list[str]) -> set[str]:
        return {name for name in entries if any(fnmatch(name, each) for each in ignored)}

    for path in found:
        if path.is_dir():
            shutil.copytree(path, to, dirs_exist_ok=True, ignore=left_out)
            continue
        into = to / path.name if len(found) > 1 or target.endswith("/") else to
        into.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, into)
    return f"{len(found)} files and folders"


def expand(text: str, variables: dict[str, str]) -> str:
    """Put variables into the text of an instruction other than RUN, whose shell does it."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: variables.get(found[1], ""), text)


def rehearse(options: argparse.Namespace, record: list[str]) -> None:
    """Run all steps and the command; SystemExit where one fails."""
    context = Path(__file__).parents[1]
    rules = (context / ".dockerignore").read_text().splitlines()
    ignored = [line.removeprefix("**/") for line in rules if line.startswith("**/")]
    sent = {
        line.removeprefix("!") for line in rules if line.startswith("!")
    }  # all else stays out, by its `*`
    work = Path(tempfile.mkdtemp(prefix="rehearsal-"))
    stages: dict[str, Stage] = {}
    stage: Stage | None = None
    given = dict(each.split("=", 1) for each in options.build_arg)

    def step(words: list[str], told: str) -> None:
        assert stage is not None, "FROM comes first"
        start = time.monotonic()
        done = stage.run(words)
        lines = done.stdout.strip().splitlines()[-SHOWN if done.returncode == 0 else -40 :]
        record.append(f"### `{told}`\n\n{time.monotonic() - start:.0f} s, status {done.returncode}\n")
        record.append("\n".join(["```", *lines, "```", ""]))
        print("\n".join(record[-2:]), flush=True)
        if done.returncode:
            raise SystemExit(f"{told}: status {done.returncode}")

    try:
        for name, text in instructions(options.dockerfile):
            if name == "FROM":
                image, _, alias = text.partition(" AS ")
                stage = open_stage(work / str(len(stages)), options.python)
                stages[alias or str(len(stages))] = stage
                record.append(f"## FROM {image}\n")
                continue
            assert stage is not None, "FROM comes first"
            if name == "ARG":
                key, _, default = text.partition("=")
                stage.variables[key] = given.get(key, " ".join(shlex.split(default)))
            elif name == "ENV":
                stage.variables |= dict(each.split("=", 1) for each in shlex.split(text))
            elif name == "WORKDIR":
                stage.folder = expand(text, stage.variables)
            elif name == "USER":
                stage.user = text
            elif name == "CMD":
                stage.command = [each.strip(' "') for each in text.strip("[]").split(",")]
            elif name == "COPY":
                told = copy(stage, shlex.split(text), context, stages, ignored, sent)
                record.append(f"### `COPY {text}`\n\n{told}\n")
            elif name == "RUN":
                step(["/bin/sh", "-c", text], f"RUN {text}")
            else:
                raise SystemExit(f"{name}: this instruction is not known here")
        assert stage is not None and stage.command, "the last stage has a command"
        for command in (shlex.join(stage.command), *options.run):
            step(shlex.split(command), command)
    finally:
        for each in stages.values():
            subprocess.run(["umount", "--recursive", "--lazy", str(each.root)], check=False)
        shutil.rmtree(work, ignore_errors=True)


def main() -> None:
    """Take a mount namespace of its own, rehearse, write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dockerfile", type=Path)
    parser.add_argument(
        "--python", default=sys._base_executable, help="the Python that stands for the image's"
    )
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--run", action="append", default=[], help="a further command in the last stage")
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    if os.geteuid():
        raise SystemExit("mounts and chroot need root: run it with sudo")
    if os.environ.get("REHEARSAL") != "1":
        os.execvpe(
            "unshare", ["unshare", "--mount", sys.executable, *sys.argv], {**os.environ, "REHEARSAL": "1"}
        )
    record: list[str] = []
    try:
        rehearse(options, record)
    finally:
        if options.record:
            head = f"# The steps of {options.dockerfile.name}, run one by one\n\n{RECORD}\n"
            options.record.write_text("\n".join([head, *record]), encoding="utf-8")


if __name__ == "__main__":
    main()
