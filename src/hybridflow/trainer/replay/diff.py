"""The first quantity in which two runs differ: `hybridflow diff RUN_A RUN_B`.

config.yaml ─► of each step: kept rows ─► metrics.jsonl ─► checkpoint ─► the next step

Rows are compared column by column in the order in which one follows from another: which rows, prompts,
tokens, the rollout's log-probs, rewards, log-probs, advantages. Checkpoints are compared tensor by tensor,
whatever their ranks. Equal means equal bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.checkpoint.layout import MODEL, step_folders, step_of
from hybridflow.checkpoint.manifest import Manifest, read_manifest
from hybridflow.checkpoint.shard_index import read_index, read_tensors
from hybridflow.checkpoint.state import decode_tree, load_tree
from hybridflow.config.tree import flatten
from hybridflow.errors import CheckpointError, ConfigError, DataError
from hybridflow.observability.glossary import find
from hybridflow.observability.report.files import read_yaml
from hybridflow.observability.trackers.jsonl import METRICS_FILE, read_metrics
from hybridflow.protocol import DataProto
from hybridflow.protocol.fields import FIELDS
from hybridflow.trainer.replay.kept_rows import HOW_TO_KEEP, KeptRows, KeptStep

MISSING = "(missing)"


@dataclass(frozen=True)
class Difference:
    """A quantity that two runs have different values of."""

    kind: str
    """The kind of quantity: config, row, prompt, token, log-prob, reward, advantage, metric, weight, …"""
    name: str
    """The key, column, metric or tensor."""
    first: Any
    """Its value in the first run."""
    second: Any
    step: int | None = None
    """Step, from 1; None for what belongs to the whole run."""
    row: int | None = None
    """Row of the step's batch, from 0."""
    position: int | tuple[int, ...] | None = None
    """Token of the prompt or of the response, or index in a weight, from 0."""
    row_id: int | None = None

    def where(self) -> str:
        """Return the place in words."""
        words = []
        if self.step is not None:
            words.append(f"step {self.step}")
        if self.row is not None:
            named = f" (row_id {self.row_id})" if self.row_id is not None else ""
            words.append(f"row {self.row}{named}")
        if self.position is not None:
            words.append(f"position {self.position}")
        return ", ".join(words)


def first_place(first: Tensor, second: Tensor) -> tuple[int, ...] | None:
    """Return the first index at which two tensors of one shape and dtype have other bits, or None; a NaN
    equals a NaN.
    """
    if first.dtype.is_floating_point:
        width = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
        differs = first.contiguous().view(width) != second.contiguous().view(width)
        differs &= ~(first.isnan() & second.isnan())
    else:
        differs = first != second
    if not bool(differs.any()):
        return None
    flat = int(differs.reshape(-1).to(torch.uint8).argmax())
    return tuple(map(int, np.unravel_index(flat, first.shape)))


def first_unequal(first: Any, second: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """Return the path and both values of the first entry in which two nested values differ, or None."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape or first.dtype != second.dtype:
            return name, _form(first.dtype, first.shape), _form(second.dtype, second.shape)
        place = first_place(first, second)
        if place is None:
            return None
        return f"{name}{list(place)}", first[place].item(), second[place].item()
    if type(first) is not type(second):
        return name, first, second
    if isinstance(first, (Mapping, list, tuple)):
        for key, one, other in pairs(first, second):
            found = first_unequal(one, other, f"{name}/{key}".lstrip("/"))
            if found is not None:
                return found
        return None
    # repr distinguishes 0.0 from -0.0, and a NaN equals a NaN
    return None if repr(first) == repr(second) else (name, first, second)


def pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the keys of two mappings, or the places of two lists, each with both values or with MISSING."""
    one, other = (each if isinstance(each, Mapping) else dict(enumerate(each)) for each in (first, second))
    for key in dict.fromkeys([*one, *other]):
        yield key, one.get(key, MISSING), other.get(key, MISSING)


def _form(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


STAGES: dict[str, tuple[str, ...]] = {
    "row": ("uid", "trajectory_id", "lineage", "row_id"),
    "prompt": ("prompts", "data_source", "reward_model", "ground_truth", "extra_info"),
    "token": ("responses", "response_mask", "call", "is_demonstration", "solution_str", "finish_reason"),
    "version": ("policy_version",),
    "rollout log-prob": ("rollout_log_probs",),
    "reward": ("token_level_scores", "rm_scores", "reward_baselines", "overlong_reward", "positive"),
    "log-prob": ("old_log_probs", "ref_log_prob", "teacher_log_probs", "entropys", "sum_pi_squared"),
    "value": ("values", "process_rewards"),
    "penalised reward": ("token_level_rewards",),
    "mask": ("rollout_is_weights", "loss_mask"),
    "advantage": ("advantages", "returns", "reward_components"),
}
"""The columns of each kind, in causal order. Other columns are what the reward has returned."""

FOLLOW = {"input_ids", "attention_mask", "group_ids"}
"""Columns that follow from compared ones."""

_KIND_OF = {name: kind for kind, names in STAGES.items() for name in names}


def row_differences(first: KeptStep, second: KeptStep) -> Iterator[Difference]:
    """Yield the first difference of each column, in causal order; where rows are others, of these alone."""
    step = first.step
    if len(first.rows) != len(second.rows):
        yield Difference("row", "number of rows", len(first.rows), len(second.rows), step)
        return
    names = dict.fromkeys([*first.rows.names(), *second.rows.names()])
    for kind in STAGES:
        own = [name for name in STAGES[kind] if name in names]
        if kind == "reward":
            own += [name for name in names if name not in _KIND_OF and name not in FOLLOW]
        different = False
        for name in own:
            found = _column(first.rows, second.rows, kind, name, step)
            if found is not None:
                different = True
                yield found
        if kind == "row" and different:
            return


def _column(a: DataProto, b: DataProto, kind: str, name: str, step: int) -> Difference | None:
    if name not in a or name not in b:
        values = ["there" if name in rows else MISSING for rows in (a, b)]
        return Difference(kind, name, values[0], values[1], step)
    if name in a.non_tensor_batch or name in b.non_tensor_batch:
        ones = a.non_tensor_batch.get(name, [MISSING] * len(a))
        others = b.non_tensor_batch.get(name, [MISSING] * len(b))
        for row, (one, other) in enumerate(zip(ones, others, strict=True)):
            found = first_unequal(one, other)
            if found is not None:
                path, *values = found
                label = f"{name}/{path}" if path else name
                return Difference(kind, label, values[0], values[1], step, row, row_id=_row_id(a, row))
        return None
    if name == "prompts":
        return _prompts(a, b, step)
    axes = FIELDS[name].axes if name in FIELDS else ""
    one = a.batch[name]
    other = b.batch[name]
    if axes == "B,R" or (not axes and one.shape == a.batch["response_mask"].shape):
        return _tokens(a, b, one, other, kind, name, step)
    found = first_unequal(one, other)
    if found is None:
        return None
    if one.shape != other.shape or one.dtype != other.dtype:
        return Difference(kind, name, found[1], found[2], step)
    place = first_place(one, other) or (0,)
    rest = place[1:] or None
    return Difference(kind, name, found[1], found[2], step, place[0], rest, _row_id(a, place[0]))


def _prompts(a: DataProto, b: DataProto, step: int) -> Difference | None:
    """Compare the prompts without their padding, which is on the left and may be wider in one run."""
    for row, (one, other) in enumerate(zip(_prompt_tokens(a), _prompt_tokens(b), strict=True)):
        if one == other:
            continue
        position = next(
            (place for place, pair in enumerate(zip(one, other)) if pair[0] != pair[1]),
            min(len(one), len(other)),
        )
        values = [tokens[position] if position < len(tokens) else MISSING for tokens in (one, other)]
        return Difference("prompt", "prompts", values[0], values[1], step, row, position, _row_id(a, row))
    return None


def _prompt_tokens(rows: DataProto) -> list[list[int]]:
    prompts = rows.batch["prompts"]
    attended = rows.batch["attention_mask"][:, : prompts.shape[1]].bool()
    return [tokens[here].tolist() for tokens, here in zip(prompts, attended, strict=True)]


def _tokens(
    a: DataProto, b: DataProto, one: Tensor, other: Tensor, kind: str, name: str, step: int
) -> Difference | None:
    """Compare values [B, R] of response tokens, whose padding on the right may be wider in one run."""
    if one.dtype != other.dtype:
        return Difference(kind, name, str(one.dtype), str(other.dtype), step)
    there = _widened(_written(a), _written(b))
    values = _widened(one, other)
    differs = there[0] != there[1]
    both = there[0] & there[1]
    blank = torch.zeros((), dtype=one.dtype)
    place = first_place(torch.where(both, values[0], blank), torch.where(both, values[1], blank))
    if name == "responses" and bool(differs.any()):
        ended = first_place(there[0], there[1])
        place = min(place or ended or (0, 0), ended or (0, 0))
    if place is None:
        return None
    row, position = place
    shown: list[Any] = [
        value[place].item() if bool(mask[place]) else MISSING
        for value, mask in zip(values, there, strict=True)
    ]
    return Difference(kind, name, shown[0], shown[1], step, row, position, _row_id(a, row))


def _written(rows: DataProto) -> Tensor:
    """Return [B, R] bool: the tokens of the responses, without padding."""
    width = rows.batch["responses"].shape[1]
    attended: Tensor = rows.batch["attention_mask"].bool()
    return attended[:, attended.shape[1] - width :]


def _widened(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    width = max(one.shape[1], other.shape[1])
    return _padded(one, width), _padded(other, width)


def _padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))


def _row_id(rows: DataProto, row: int) -> int | None:
    return int(rows.batch["row_id"][row]) if "row_id" in rows else None


def checkpoint_differences(first: Path, second: Path, step: int, notes: list[str]) -> Iterator[Difference]:
    """Yield every tensor that differs, at its first element: weights first, then optimizers, then the
    driver's state. What cannot be read, or is not what its manifest says, is added to `notes`.
    """
    manifests = []
    for folder in (first, second):
        try:
            manifests.append(read_manifest(folder))
        except CheckpointError as error:
            notes.append(f"not compared: {error}")
    if len(manifests) < 2:
        return
    damages = [manifest.damage(folder) for folder, manifest in zip((first, second), manifests)]
    notes += [f"damaged checkpoint: {damage}" for damage in damages if damage is not None]
    damaged = any(damages)
    engines = [manifest.engines for manifest in manifests]
    for role in sorted({*engines[0], *engines[1]}):
        if role not in engines[0] or role not in engines[1]:
            values = ["there" if role in names else MISSING for names in engines]
            yield Difference("weight", role, values[0], values[1], step)
        elif damaged or _files(manifests[0], role) != _files(manifests[1], role):
            yield from _engine(first / role, second / role, role, step, notes)
    for role in sorted({*manifests[0].roles} & {*manifests[1].roles}):
        try:
            found = first_unequal(load_tree(first / role), load_tree(second / role), role)
        except CheckpointError as error:
            notes.append(f"not compared: {error}")
            continue
        if found is not None:
            yield Difference("state", *found, step)


def _files(manifest: Manifest, role: str) -> dict[str, Any]:
    return {name: digest for name, digest in manifest.files.items() if name.startswith(f"{role}/")}


def _engine(first: Path, second: Path, role: str, step: int, notes: list[str]) -> Iterator[Difference]:
    """Yield the tensors of an engine's state that differ, those of the model first."""
    try:
        indexes = [read_index(first), read_index(second)]
        parts = dict.fromkeys([MODEL, *indexes[0].structure, *indexes[1].structure])
        for part in parts:
            if any(part not in index.structure for index in indexes):
                notes.append(f"step {step}, {role}: {part} is in one of the two checkpoints only")
                continue
            yield from _part(first, second, f"{role}/{part}", part, step)
            # tensors have been compared by themselves
            numbers = [decode_tree(index.structure[part], lambda _: torch.empty(0)) for index in indexes]
            found = first_unequal(numbers[0], numbers[1], f"{role}/{part}")
            if found is not None:
                yield Difference(_kind(part), *found, step)
    except CheckpointError as error:
        notes.append(f"not compared: {error}")


def _part(first: Path, second: Path, label: str, part: str, step: int) -> Iterator[Difference]:
    tensors = [read_tensors(first, part), read_tensors(second, part)]
    for name in dict.fromkeys([*tensors[0], *tensors[1]]):
        forms = [_form(one.dtype(name), one.shape(name)) if name in one else MISSING for one in tensors]
        if forms[0] != forms[1]:
            yield Difference(_kind(part), f"{label}/{name}", forms[0], forms[1], step)
            continue
        one = tensors[0][name]
        other = tensors[1][name]
        place = first_place(one, other)
        if place is not None:
            values = (one[place].item(), other[place].item())
            yield Difference(_kind(part), f"{label}/{name}", *values, step, position=place)


def _kind(part: str) -> str:
    return "weight" if part == MODEL else "optimizer"


NAMES_AND_OUTPUT = {
    "data.cache_dir",
    "trainer.project_name",
    "trainer.experiment_name",
    "trainer.default_local_dir",
    "trainer.logger",
    "trainer.wandb_proxy",
    "trainer.save_freq",
    "trainer.max_ckpt_to_keep",
    "trainer.remote_checkpoint_dir",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.esi_redundant_time",
    "trainer.keep_rows",
    "trainer.rollout_data_dir",
    "trainer.validation_data_dir",
    "trainer.log_val_generations",
    "trainer.worker_timeout",
    "trainer.heartbeat_timeout",
    "trainer.startup_timeout",
    "trainer.max_restarts",
}
"""Keys that change no number of a run."""

OF_THE_WAY = (
    "timing_s/",
    "fully_async/",
    "perf/",
    "rollout/",
    "reward/seconds",
    "reward/num_cached",
    "reward/num_retries",
    "checkpoint/",
    "agent/max_concurrent",
    "agent/num_preempted",
    "agent/processes/",
)
"""Metrics of how the work was done, which no two runs share, by the beginnings of their names."""


@dataclass
class RunDiff:
    """The differences found between two runs."""

    differences: list[Difference] = field(default_factory=list)
    """All differing keys, then the first difference of each further kind, in causal order."""
    compared: dict[str, int] = field(default_factory=dict)
    """How much of each kind was compared: keys, steps with rows, steps with metrics, checkpoints."""
    notes: list[str] = field(default_factory=list)
    """What could not be compared, and why."""

    @property
    def status(self) -> int:
        """0: equal in all that was compared; 1: different; 2: nothing of a step could be compared."""
        if self.differences:
            return 1
        return 0 if self.compared["metric lines"] or self.compared["steps with rows"] else 2


def diff_runs(first: Path, second: Path) -> RunDiff:
    """Compare two run folders. Raises ConfigError for a folder that is none."""
    found = RunDiff()
    configs = [_config(run) for run in (first, second)]
    found.compared["keys"] = len(configs[0].keys() | configs[1].keys())
    for key, one, other in pairs(configs[0], configs[1]):
        if key not in NAMES_AND_OUTPUT and first_unequal(one, other) is not None:
            found.differences.append(Difference("config", key, one, other))
    _note_machines(first, second, found)
    seen: set[str] = set()
    for difference in _step_differences(first, second, found):
        if difference.kind not in seen:
            seen.add(difference.kind)
            found.differences.append(difference)
    return found


def repeatable(name: str) -> bool:
    """Return whether two runs that compute the same log the same value of this metric."""
    if name == "perf/total_num_tokens":
        return True
    entry = find(name)
    return not (name.startswith(OF_THE_WAY) or (entry is not None and entry.unit == "s"))


def metric_differences(
    first: Mapping[str, Any], second: Mapping[str, float], step: int
) -> Iterator[Difference]:
    """Yield the repeatable metrics in which two lines of a step differ."""
    for name, one, other in pairs(first, second):
        if repeatable(name) and first_unequal(one, other) is not None:
            yield Difference("metric", name, one, other, step)


def _config(run: Path) -> dict[str, Any]:
    try:
        return dict(flatten(read_yaml(run / "config.yaml")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{run} is no run folder (trainer.default_local_dir of a run): {error}") from error


def _note_machines(first: Path, second: Path, found: RunDiff) -> None:
    """Add a note where the machines differ, which explains differences in the last bits."""
    facts = []
    for run in (first, second):
        try:
            facts.append(json.loads((run / "machine.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return
    for name in facts[0]:
        if facts[0][name] != facts[1].get(name):
            values = f"{facts[0][name]} and {facts[1].get(name)}"
            found.notes.append(f"other machines: {name} is {values}, so last bits may differ")


def _step_differences(first: Path, second: Path, found: RunDiff) -> Iterator[Difference]:
    runs = (first, second)
    metrics = [read_metrics(run / METRICS_FILE) for run in runs]
    kept = [KeptRows(run) for run in runs]
    rows = [set(one.steps()) for one in kept]
    saved = [{step_of(folder) or 0: folder for folder in step_folders(run)} for run in runs]
    found.compared |= {"steps with rows": 0, "metric lines": 0, "checkpoints": 0}
    _note_missing(runs, metrics, rows, saved, found)
    for step in sorted({*metrics[0], *metrics[1], *rows[0], *rows[1], *saved[0], *saved[1]}):
        if step in rows[0] & rows[1]:
            try:
                steps = [one.read(step) for one in kept]
                found.compared["steps with rows"] += 1
                yield from row_differences(steps[0], steps[1])
            except DataError as error:
                found.notes.append(f"not compared: {error}")
        if step in metrics[0].keys() & metrics[1].keys():
            found.compared["metric lines"] += 1
            yield from metric_differences(metrics[0][step], metrics[1][step], step)
        if step in saved[0].keys() & saved[1].keys():
            found.compared["checkpoints"] += 1
            yield from checkpoint_differences(saved[0][step], saved[1][step], step, found.notes)


def _note_missing(
    runs: tuple[Path, Path],
    metrics: list[dict[int, dict[str, float]]],
    rows: list[set[int]],
    saved: list[dict[int, Path]],
    found: RunDiff,
) -> None:
    """Note the steps that only one of the runs has data of."""
    advice = {"metrics": "", "rows": f": {HOW_TO_KEEP}", "checkpoints": ": set trainer.save_freq"}
    lists = {
        "metrics": [set(steps) for steps in metrics],
        "rows": rows,
        "checkpoints": [set(steps) for steps in saved],
    }
    for what, (ours, theirs) in lists.items():
        if not ours and not theirs:
            found.notes.append(f"neither run has {what}{advice[what]}")
        for run, has, other in ((runs[0], ours, theirs), (runs[1], theirs, ours)):
            if other - has:
                steps = ", ".join(map(str, sorted(other - has)[:8]))
                more = ", …" if len(other - has) > 8 else ""
                found.notes.append(f"{run} has no {what} of steps {steps}{more}{advice[what]}")
