"""The folder of a server: sessions, training runs and their checkpoints, each complete once it is there.

FOLDER/sessions.json                                   sessions and samplers
FOLDER/runs/RUN/run.json                               what the run is, and its newest saved state
FOLDER/runs/RUN/{weights,sampler_weights}/NAME/        an adapter, checkpoint.json; of weights the optimizer
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from hybridflow.checkpoint.durable import locked, replace_file, sync, sync_tree
from hybridflow.errors import ConfigError
from hybridflow.tinker.wire import Refusal

WEIGHTS = "weights"
SAMPLER = "sampler_weights"
TYPES = {WEIGHTS: "training", SAMPLER: "sampler"}
SCHEME = "tinker://"
UNNAMED = "_"
"""First letter of the names that the server gives."""
_OLD = ".tmp_old_"
_OF_RUN = ("model_id", "session_id", "created", "user_metadata", "rank")
"""What the file of a run has at least."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"[\w:.-]{0,199}\w", re.ASCII)
Facts = dict[str, Any]


class Store:
    """The folder, which one server has at a time."""

    def __init__(self, folder: Path) -> None:
        """Open or make a folder; ConfigError where another server has it, or it cannot be read."""
        self.folder = folder
        self._held = ExitStack()
        try:
            (folder / "runs").mkdir(parents=True, exist_ok=True)
            is_free = self._held.enter_context(locked(folder / ".lock"))
        except OSError as error:
            raise ConfigError(f"--folder {folder} is no folder that can be written: {error}") from error
        if not is_free:
            raise ConfigError(
                f"the folder {folder} belongs to a server that runs: end it, or give another --folder"
            )
        for old in folder.glob(f"runs/*/*/{_OLD}*"):  # a server was killed while it replaced this one
            if not (whole := old.with_name(old.name.removeprefix(_OLD))).exists():
                old.rename(whole)
        for left in folder.glob("runs/*/*/.tmp_*"):
            shutil.rmtree(left)
        try:
            self.known: Facts = {"sessions": {}, "samplers": {}}
            """Sessions and samplers when the folder was opened."""
            if (folder / "sessions.json").exists():
                self.known = _read(folder / "sessions.json", ("sessions", "samplers"))
            found = [_read(path, _OF_RUN) for path in folder.glob("runs/*/run.json")]
            self.runs = sorted(found, key=lambda run: str(run["created"]))
            """Facts of all runs when the folder was opened, the oldest first."""
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another server have the folder."""
        self._held.close()

    def write_sessions(self, known: Facts) -> None:
        """Write sessions and samplers."""
        replace_file(self.folder / "sessions.json", json.dumps(known))

    def write_run(self, run: Facts) -> None:
        """Write the facts of a run."""
        folder = self.folder / "runs" / run["model_id"]
        folder.mkdir(exist_ok=True)
        replace_file(folder / "run.json", json.dumps(run))

    def save(
        self,
        model_id: str,
        kind: str,
        name: str | None,
        seq: int,
        facts: Facts,
        fill: Callable[[Path], None],
        *,
        overwrite: bool,
    ) -> str:
        """Write a checkpoint with `fill` and return its address; Refusal for a name that cannot be used.

        Without a name it has that of the request's number `seq`.
        """
        if name is None:
            name = f"{UNNAMED}{seq}"
        elif not _NAME.fullmatch(name):
            raise Refusal(
                f"the name {name!r}: wanted up to 128 letters, digits, dots, dashes and underscores, and a "
                "letter or a digit first"
            )
        parent = self.folder / "runs" / model_id / kind
        final = parent / name
        if final.exists() and not overwrite:
            raise Refusal(f"the run has {kind}/{name} already: give another name, or overwrite=True")
        temporary = parent / f".tmp_{name}"
        temporary.mkdir(parents=True)
        try:
            fill(temporary)
            (temporary / "checkpoint.json").write_text(json.dumps(facts))
            sync_tree(temporary)
        except BaseException:
            shutil.rmtree(temporary)
            raise
        old = parent / f"{_OLD}{name}"
        if final.exists():
            final.rename(old)
        temporary.rename(final)
        sync(parent)
        shutil.rmtree(old, ignore_errors=True)
        return f"{SCHEME}{model_id}/{kind}/{name}"

    def forget_unnamed(self, model_id: str, keep: int) -> None:
        """Remove all but the newest `keep` sampler weights without a name."""
        found = (self.folder / "runs" / model_id / SAMPLER).glob(f"{UNNAMED}*")
        for old in sorted(found, key=lambda path: int(path.name.removeprefix(UNNAMED)), reverse=True)[keep:]:
            shutil.rmtree(old)

    def find(self, address: str, kinds: tuple[str, ...] = (WEIGHTS, SAMPLER)) -> Path:
        """Return the folder of a checkpoint by its address; Refusal where there is none of these kinds."""
        parts = address.removeprefix(SCHEME).split("/")
        known = address.startswith(SCHEME) and len(parts) == 3 and parts[1] in kinds
        if known and all(_PART.fullmatch(part) for part in parts):
            folder = self.folder.joinpath("runs", *parts)
            with suppress(FileNotFoundError):
                if not _has_expired(_facts(folder)):
                    return folder
        raise Refusal(
            f"there are no weights at {address!r} (never saved, removed, or expired): wanted "
            f"{SCHEME}RUN/{'|'.join(kinds)}/NAME as save_state or save_weights_for_sampler returned it"
        )

    def facts(self, address: str) -> Facts:
        """Return what is known of a checkpoint."""
        return _facts(self.find(address))

    def delete(self, address: str) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(self.find(address))

    def set_expiry(self, address: str, seconds: int | None) -> None:
        """Let a checkpoint expire some seconds from now; None: never."""
        folder = self.find(address)
        replace_file(
            folder / "checkpoint.json", json.dumps({**_facts(folder), "expires_at": expiry(seconds)})
        )

    def checkpoints(self, model_id: str = "*") -> list[Facts]:
        """Return the checkpoints of a run or of all, the newest first, and remove what has expired."""
        found = []
        for path in self.folder.glob(f"runs/{model_id}/*/*/checkpoint.json"):
            folder = path.parent
            if folder.name.startswith("."):  # not whole yet, or no longer
                continue
            with suppress(FileNotFoundError):  # the model's thread saves, replaces and removes meanwhile
                facts = _facts(folder)
                if _has_expired(facts):
                    shutil.rmtree(folder)
                elif not folder.name.startswith(UNNAMED):
                    run, kind, name = folder.parts[-3:]
                    found.append(
                        {
                            "checkpoint_id": f"{kind}/{name}",
                            "checkpoint_type": TYPES[kind],
                            "tinker_path": f"{SCHEME}{run}/{kind}/{name}",
                            "size_bytes": sum(file.stat().st_size for file in folder.iterdir()),
                            **{key: facts[key] for key in ("time", "expires_at", "user_metadata")},
                        }
                    )
        return sorted(found, key=lambda each: str(each["time"]), reverse=True)


def now() -> str:
    """Return the time as the client reads it."""
    return datetime.now(UTC).isoformat()


def expiry(seconds: int | None) -> str | None:
    """Return the time in some seconds, or None."""
    return None if seconds is None else (datetime.now(UTC) + timedelta(seconds=seconds)).isoformat()


def _read(path: Path, keys: tuple[str, ...]) -> Facts:
    """Return what a file has; ConfigError where it is broken."""
    try:
        facts: Facts = json.loads(path.read_text(encoding="utf-8"))
        problem = ", ".join(key for key in keys if key not in facts)
    except (OSError, ValueError, TypeError) as error:
        problem = str(error)
    if problem:
        raise ConfigError(
            f"the server cannot go on from {path}, which is broken ({problem}): put a copy of it back, or "
            "move it away and lose what it names"
        )
    return facts


def _facts(folder: Path) -> Facts:
    facts: Facts = json.loads((folder / "checkpoint.json").read_text())
    return facts


def _has_expired(facts: Facts) -> bool:
    return facts["expires_at"] is not None and facts["expires_at"] < now()
