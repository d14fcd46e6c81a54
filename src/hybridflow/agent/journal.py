"""The journal of a run's episodes, so that one whose process was killed goes on from its last turn.

    once("step 2", …) ─► done? ──yes──► the result of then
                          │ no: line "begun" ─► the call ─► line "done" with its result
                          └ begun, and not done: the call was cut off, and `lost` decides

An episode is played again from its beginning, and what it has done is answered from here, so it comes to its
last turn with the same tokens and messages, and calls nothing twice. Lines are on the disk before what they
allow. A group has a file, `GROUP.jsonl`, with the lives of its samples: a life ends where its try has failed,
or where it could not go on and the episode was begun anew. Files go once a checkpoint has their rows.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar, cast
from uuid import uuid4

import numpy as np

from hybridflow.agent.collate import GROUPS_PER_STEP, group_index
from hybridflow.checkpoint.durable import replace_file, sync
from hybridflow.config import PPOConfig
from hybridflow.environments.base import Observation, Step
from hybridflow.errors import HybridFlowError, TrainingError
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import FailureCause
from hybridflow.rollout.base import GenerationOutput
from hybridflow.tools.base import ToolAnswer

logger = logging.getLogger(__name__)

FOLDER = "journal"
"""The journal's folder in that of its run."""
SAMPLED = "generate "
"""Beginning of the names of calls to the policy."""
T = TypeVar("T")


class BegunAnew(HybridFlowError):
    """An episode cannot go on by its journal, and begins from its first turn."""


class Form(NamedTuple, Generic[T]):
    """How a result is written as JSON, and read again."""

    write: Callable[[T], Any]
    read: Callable[[Any], T]


def _write_observation(observation: Observation) -> Any:
    if not isinstance(observation, Prompt):
        return observation
    if observation.media:
        raise TypeError("a prompt of token ids with pictures")
    return list(observation.token_ids)


def _read_output(line: Any) -> GenerationOutput:
    if line["routes"] is not None:
        line = {**line, "routes": np.array(line["routes"], np.int16)}
    if line["top_log_probs"] is not None:
        line = {**line, "top_log_probs": [[(*each,) for each in place] for place in line["top_log_probs"]]}
    return GenerationOutput(**line)


OUTPUT = Form[GenerationOutput](lambda output: dict(output.__dict__), _read_output)
ANSWER = Form[ToolAnswer](
    lambda answer: dict(vars(answer)),
    lambda line: ToolAnswer(**{**line, "images": tuple(line.get("images", ()))}),
)
OBSERVATION = Form[Observation](_write_observation, lambda line: cast(Observation, line))
STEP = Form[Step](
    lambda step: {**vars(step), "observation": _write_observation(step.observation)},
    lambda line: Step(**line),
)
NUMBER = Form["float | None"](lambda number: number, lambda line: cast("float | None", line))


@dataclass
class Life:
    """The calls of one try of an episode, and how it ended."""

    of: str
    """Digest of its seeds and its prompt."""
    begun: dict[str, str] = field(default_factory=dict)
    """Digest of what each call was made with, by the call's name."""
    done: dict[str, Any] = field(default_factory=dict)
    """Results by the names of the calls."""
    state: Any = None
    """The environment's state after the newest call of it, where it gives one."""
    failed: tuple[FailureCause, str] | None = None
    is_over: bool = False
    """Whether it could not go on."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Follow one line of the file."""
        if "begun" in line:
            self.begun[line["begun"]] = line["with"]
        elif "done" in line:
            self.begun[line["done"]] = line["with"]
            self.done[line["done"]] = line["result"]
            self.state = line.get("state", self.state)
        elif "failed" in line:
            self.failed = (line["failed"], line["detail"])
        else:
            self.is_over = True


class GroupFile:
    """The lines of a group: those that an earlier process has left, and the new ones; a torn end is cut."""

    def __init__(self, path: Path) -> None:
        self.lives: dict[tuple[int, int], Life] = {}
        """By the numbers of the sample and of its life."""
        self._path = path
        self._descriptor: int | None = None
        self._size = 0
        self._lock = Lock()
        for line in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
            try:
                if not line.endswith(b"\n"):
                    break
                self._take(json.loads(line))
            except (
                ValueError,
                KeyError,
                TypeError,
            ):  # the process was killed as it wrote, or the disk failed
                break
            self._size += len(line)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line and wait until it is on the disk. TypeError, and nothing written, for what is not
        JSON, which has keys of text alone.
        """
        _check_keys(line)
        text = json.dumps(line, default=_plain).encode() + b"\n"
        with self._lock:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT, 0o644)
                sync(self._path.parent)
            os.ftruncate(self._descriptor, self._size)
            if os.pwrite(self._descriptor, text, self._size) < len(text):
                raise OSError(f"{self._path}: the disk is full")
            os.fsync(self._descriptor)
            self._size += len(text)
            self._take(json.loads(text))

    def close(self) -> None:
        """Close the file; a line that comes late opens it again."""
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
            self._descriptor = None

    def _take(self, line: Mapping[str, Any]) -> None:
        self.lives.setdefault((line["sample"], line["life"]), Life(line["of"])).take(line)


class Journal:
    """The journal in a run's folder. A group is written by one process at a time."""

    def __init__(self, folder: Path, groups_per_step: int) -> None:
        """Open it, or begin one. `run` is part of the ids of its calls, and unlike that of any other."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._groups_per_step = groups_per_step
        self._open: dict[int, GroupFile] = {}
        self._own = folder / "run.json"
        try:
            known = json.loads(self._own.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            known = None
        if isinstance(known, dict) and isinstance(known.get("models"), dict) and "run" in known:
            self.run: str = known["run"]
        else:
            self.begin({})

    @classmethod
    def of_run(cls, config: PPOConfig) -> Journal | None:
        """Return the journal of a run, or None where it keeps none."""
        if not config.actor_rollout_ref.rollout.multi_turn.journal:
            return None
        return cls(Path(config.trainer.default_local_dir).expanduser() / FOLDER, config.data.train_batch_size)

    def begin(self, models: Mapping[str, Any]) -> None:
        """Forget all episodes: those of now on are of another run, with these models."""
        self.keep(lambda _: False)
        self.run = uuid4().hex[:12]
        replace_file(self._own, json.dumps({"run": self.run, "models": models}))

    def settle(self, models: Mapping[str, Any], *, anew: bool) -> None:
        """Begin where the run does not go on (`anew`), or where the journal is of other models or keys."""
        theirs = json.loads(self._own.read_text(encoding="utf-8"))["models"]
        if theirs and theirs != models and not anew:
            logger.warning(
                "the journal of episodes in %s is of other models or keys: it begins anew", self._folder
            )
        if anew or theirs != models:
            self.begin(models)

    def episode(self, group: int, sample: int, of: Iterable[Any]) -> EpisodeJournal:
        """Return what is known of an episode; `of` are the facts without which its past is another's."""
        if group not in self._open:
            self._open[group] = GroupFile(self._path(group))
        return EpisodeJournal(self._open[group], f"{self.run}.{group}", sample, digest(list(of)))

    def close_groups(self, groups: Iterable[int]) -> None:
        """Close the files of groups whose episodes have ended."""
        for group in set(groups) & set(self._open):
            self._open.pop(group).close()

    def oldest_version(self, index: int) -> int | None:
        """Return the oldest version of the weights that sampled a token of the group of this index; None:
        it has none.
        """
        step, place = divmod(index, self._groups_per_step)
        lives = GroupFile(self._path((step + 1) * GROUPS_PER_STEP + place)).lives.values()
        calls = [result for life in lives for name, result in life.done.items() if name.startswith(SAMPLED)]
        return min((version for call in calls for version in call["policy_versions"]), default=None)

    def keep(self, waits: Callable[[int], bool]) -> None:
        """Remove the files of all groups but those of which `waits(index)` holds."""
        for path in self._folder.glob("*-*.jsonl"):
            is_group = path.stem.replace("-", "").isdigit()
            if is_group and not waits(group_index(path.stem, self._groups_per_step)):
                path.unlink(missing_ok=True)

    def committed(self, source: Mapping[str, Any]) -> None:
        """Remove what a checkpoint has made superfluous, which has this state of the source."""
        groups = source.get("groups", ())
        open_groups = {group["index"] for group in groups if group["rows"] is None}
        self.keep(lambda index: index >= source["admitted"] or index in open_groups)

    def _path(self, group: int) -> Path:
        return self._folder / "{}-{}.jsonl".format(*divmod(group, GROUPS_PER_STEP))


class EpisodeJournal:
    """The journal of one try of an episode."""

    def __init__(self, file: GroupFile, prefix: str, sample: int, of: str) -> None:
        own = {life: past for (owner, life), past in file.lives.items() if owner == sample}
        fitting = [life for life, past in own.items() if past.of == of and not past.is_over]
        number = fitting[-1] if fitting else len(own)
        self._file = file
        self._life = file.lives.setdefault((sample, number), Life(of))
        self._heads = {"sample": sample, "life": number, "of": of}
        self.name = f"{prefix}.{sample}.{number}"
        """Prefix of the ids of its calls."""
        self.has_past = bool(self._life.done)
        self.num_unknown = 0
        """Calls of which it was told that nobody knows whether they were carried out."""

    @property
    def failed(self) -> tuple[FailureCause, str] | None:
        """Cause and words of the failure of this try, where it has failed before."""
        return self._life.failed

    @property
    def state(self) -> Any:
        """The environment's state after the newest call of it, or None."""
        return self._life.state

    async def once(
        self,
        name: str,
        inputs: Any,
        form: Form[T],
        work: Callable[[], Awaitable[T]],
        *,
        lost: Callable[[], Awaitable[T | None]] | None = None,
        found: Callable[[], None] | None = None,
        state: Callable[[], Awaitable[Any]] | None = None,
    ) -> T:
        """Return the result of the call `name`: that of the journal, of which `found` is then told, or of
        `work`.

        Where an earlier process has begun it and its end is not known, `lost` gives the result, or None: it
        is made again. A call without `lost` has no side effects, and its begin is not noted. `state` is
        asked after the call. Raises BegunAnew where the call was made with other `inputs`.
        """
        life = self._life
        if life.is_over:
            return await work()
        of = digest(inputs)
        if life.begun.get(name, of) != of:
            raise BegunAnew(f"its call {name!r} was another one before")
        if name in life.done:
            if found is not None:
                found()
            return form.read(life.done[name])
        result = None
        if lost is not None:
            if name in life.begun:
                result = await lost()
            else:
                await self._append({"begun": name, "with": of})
        if result is None:
            result = await work()
        try:
            line = {"done": name, "with": of, "result": form.write(result)}
            if state is not None:
                line["state"] = await state()
            await self._append(line)
        except (TypeError, ValueError, RecursionError) as error:
            _tell_once(f"the answer of a call, or the state after it, has {error}")
            await self.end(str(error))
        return result

    async def fail(self, cause: FailureCause, detail: str) -> None:
        """Note that this try has failed: a later process does not repeat it."""
        await self._append({"failed": cause, "detail": detail})

    async def end(self, reason: str) -> None:
        """Note that this try does not go on."""
        await self._append({"over": reason})

    async def _append(self, line: dict[str, Any]) -> None:
        try:
            await asyncio.to_thread(self._file.append, {**self._heads, **line})
        except OSError as error:
            raise TrainingError(
                f"the journal of episodes cannot be written: {error}. Make room for the run's folder, or set "
                "actor_rollout_ref.rollout.multi_turn.journal=false"
            ) from error


def settings_of(config: PPOConfig) -> str:
    """Return a digest of the keys by which an episode, or what it is worth, could be another one: all but
    those of the run's length, machine and log.
    """
    blocks = asdict(replace(config, trainer=type(config.trainer)()))
    return digest([blocks[name] for name in sorted(blocks) if name not in ("ray_kwargs", "global_profiler")])


def digest(value: Any) -> str:
    """Return a short digest of a value of plain types."""
    return blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _check_keys(value: Any) -> None:
    """Raise TypeError for a mapping whose keys JSON would make texts of."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r}, of which JSON would make a text")
            _check_keys(each)
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in value):
        for each in value:
            _check_keys(each)


def _plain(value: Any) -> Any:
    """Return a number or an array of numpy's or torch's as plain ones; TypeError for anything else."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"an object of {type(value).__name__}, which JSON cannot write")


@functools.cache
def _tell_once(text: str) -> None:
    logger.warning("episodes cannot be continued after a loss: %s", text)
