"""Does every key that shapes training move something? Each is set to another value on a tiny model.

    python benchmarks/keys_that_move.py [--before CHECKOUT]   # writes benchmarks/results/keys_that_move.md

The keys are those of `PPOConfig` and `DPOConfig`, so that a new one is tried without being named; `NOTHING`
names kinds of keys that shape no number, with the reason. A cell is a run of a step or more in this process,
and the same with one other value. The two differ in sampled tokens, scores, advantages, losses, norms of
gradients, weights, validation or another metric; or the value is refused, or a note of `hybridflow config`
says that the key is not read. A metric that repeats a key, or that is new and 0, is no difference. What is
none of this is silent.

Each key is tried in the base run, and in the runs of `TRIALS` that give it something to act on: the losses
and estimators that read it, the role or the feature that it belongs to. `--before` does the same with the
sources of another checkout, and names the keys that were silent there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import Any

from keys_that_move_tables import (
    ACTOR,
    BASE,
    BASE_OF_PAIRS,
    CODE,
    ESTIMATOR,
    FOR_ESTIMATORS,
    FOR_LOSSES,
    LOSS,
    NOTHING,
    ROLES,
    SHARED,
    TERMS,
    TRIALS,
    Settings,
    Trial,
)

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES
from hybridflow.config import DPOConfig, PPOConfig
from hybridflow.config.load import Loaded, prepare_config
from hybridflow.config.relations import shown
from hybridflow.config.tree import KeyInfo, arguments_of_keys, get_value, keys_of
from hybridflow.errors import ConfigError, HybridFlowError

TARGET = Path(__file__).resolve().parent / "results" / "keys_that_move.md"
PARTS = ("tokens", "scores", "advantages", "loss", "gradient", "weights", "validation", "metrics")
ENDED = "ended"
"""The one part of a run that an error has ended, which is a value's effect and no refusal of it."""
LASTING = ("weights", "validation")
"""Parts of which one has to move: what an update left behind. A metric alone may be told of a term that no
gradient has.
"""
ECHOES = ("/lr", "actor/kl_coef", "actor/reward_kl_penalty_coeff")
"""Ends of the names of metrics that repeat a key."""
WORK = ("timing_s/", "perf/", "rollout/", "reward/seconds", "fully_async/")
"""Beginnings of the names of metrics that say how the work was done."""
UNREAD = re.compile(r"(?:is|are) (?:read only|read by|not read|not used)|(?:has|have) no effect|changes no")
"""Words of notes that say that a key does nothing."""


@dataclass(frozen=True)
class Cell:
    """A key, its other value, and the keys of both runs."""

    key: str
    value: Any
    beside: Settings
    also: Settings

    @property
    def settings(self) -> Settings:
        """The keys of the run with the other value, beside those of the base."""
        return {**self.beside, **self.also, self.key: self.value}

    @property
    def context(self) -> str:
        """The keys beside the base, as words."""
        return " ".join(f"{name}={shown(value)}" for name, value in self.beside.items())


@dataclass(frozen=True)
class Verdict:
    """What became of a cell: the parts of a run that moved, or the line that refuses or tells; or nothing."""

    kind: typing.Literal["moved", "refused", "told", "silent"]
    text: str = ""


def trained_keys(root: type = PPOConfig) -> dict[str, KeyInfo]:
    """Return the keys of a kind of run that are tried: all but those of `NOTHING`."""
    return {
        path: info
        for path, info in keys_of(root).items()
        if path in TRIALS or not any(fnmatch(path, pattern) for pattern in NOTHING)
    }


def contexts(path: str) -> Iterator[dict[str, Any]]:
    """Yield the keys with which a key is read: its role, or each estimator and each loss that reads it."""
    role = next((beside for block, beside in ROLES.items() if path.startswith(block)), {})
    if path.endswith(".enable"):
        role = {}
    arguments = arguments_of_keys(PPOConfig).get(path, frozenset())
    if path.removeprefix(f"{ACTOR}.") in TERMS:
        yield {}
        yield from (of_loss(name) for name in POLICY_LOSSES if name not in ("vanilla", "gmpo", "gpg"))
        return
    losses = [name for name, facts in POLICY_LOSSES.items() if arguments & set(facts.reads)]
    estimators = [name for name, facts in ESTIMATORS.items() if arguments & set(facts.reads)]
    yield from (of_loss(name) for name in losses)
    yield from ({ESTIMATOR: name, **FOR_ESTIMATORS.get(name, {})} for name in estimators)
    if not losses and not estimators:
        yield {**role}


def of_loss(name: str) -> dict[str, Any]:
    """Return the keys of a run with a policy loss."""
    return {f"{LOSS}.loss_mode": name, **FOR_LOSSES.get(name, {})}


def other_values(info: KeyInfo, value: Any) -> tuple[Any, ...]:
    """Return other values of a key than that of the run, by its type: booleans flip, numbers grow, a name
    becomes each other one.
    """
    kinds = typing.get_args(info.type) or (info.type,)
    if typing.get_origin(info.type) is typing.Literal:
        return tuple(name for name in kinds if name != value)
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int):
        return (value * 2 or 2,)
    if isinstance(value, float):
        return (value * 3 or 0.1,)
    raise AssertionError(f"{info.path}={value}: give it other values in TRIALS, or its kind in NOTHING")


Found = Mapping[str, list[tuple[Cell, Verdict]]]
"""Cells and their verdicts by key."""


class Bench:
    """Runs of a kind on tiny models below a folder; each set of keys runs once."""

    def __init__(self, folder: Path, root: type[PPOConfig] | type[DPOConfig] = PPOConfig) -> None:
        self.folder = folder
        self.root = root
        self.base = BASE if root is PPOConfig else BASE_OF_PAIRS
        self._ran: dict[str, dict[str, Any] | str] = {}
        self._checked: dict[str, Loaded[Any] | str] = {}
        if not (folder / "reward.py").exists():
            make_inputs(folder)

    def cells(self, info: KeyInfo) -> Iterator[Cell]:
        """Yield the cells of a key: alone in the base run, and in each run that gives it something to do."""
        path = info.path
        block = path.rpartition(".")[0]
        shared = (trials for end, trials in SHARED.items() if f".{path}".endswith(f".{end}"))
        trials = TRIALS.get(path) or next(shared, [Trial()])
        found: dict[str, Cell] = {}
        for trial in trials:
            also = _whole(trial.also, block)
            fitting = [(context | _whole(trial.beside, block), also) for context in contexts(path)]
            alone: list[tuple[Settings, Settings]] = [
                ({}, {}),
                *((context, {}) for context in contexts(path)),
            ]
            for beside, together in [*(alone if trial.alone else ()), *fitting]:
                now = get_value(self.prepared(beside).config, path)
                for value in trial.values or other_values(info, now):
                    cell = Cell(path, value, beside, together)
                    if value != now:
                        found[str(cell)] = cell
        yield from found.values()

    def verdict(self, cell: Cell) -> Verdict:
        """Return what becomes of a cell."""
        settings = cell.settings
        known = self.prepared(cell.beside).notes
        loaded = self._check(settings)
        if isinstance(loaded, str):
            return Verdict("refused", loaded)
        blocks = cell.key.split(".")[:-1]
        names = [cell.key, *(".".join([*blocks[: i + 1], "*"]) for i in range(len(blocks)))]
        for note in loaded.notes:
            subject = UNREAD.split(note)[0]
            named = any(re.search(rf"{re.escape(name)}(?!\w)", subject) for name in names)
            if note not in known and named and subject != note:
                return Verdict("told", self._without_paths(note))
        before = self.run(cell.beside)
        assert not isinstance(before, str) and ENDED not in before, f"beside {cell.context}: {before}"
        found = self.run(settings)
        if isinstance(found, str):
            return Verdict("refused", found)
        if ENDED in found:
            return Verdict("moved", "ends the run")
        parts = [part for part in PARTS if differ(before[part], found[part])]
        return Verdict("moved" if {*LASTING} & {*parts} else "silent", ", ".join(parts))

    def run(self, settings: Settings) -> dict[str, Any] | str:
        """Return what a run with these keys beside those of the base gives, by part; or its error."""
        name = _name(settings)
        if name not in self._ran:
            try:
                self._ran[name] = self._train(settings)
            except ConfigError as error:
                self._ran[name] = self._without_paths(str(error))
            except HybridFlowError as error:
                self._ran[name] = {ENDED: self._without_paths(str(error))}
            shutil.rmtree(self.folder / "run", ignore_errors=True)
        return self._ran[name]

    def forget(self, cell: Cell) -> None:
        """Drop what the run with the other value gave, so that it runs again."""
        self._ran.pop(_name(cell.settings), None)

    def prepared(self, settings: Settings) -> Loaded[Any]:
        """Return the configuration with these keys beside those of the base, and its notes."""
        loaded = self._check(settings)
        assert not isinstance(loaded, str), f"{settings}: {loaded}"
        return loaded

    def _check(self, settings: Settings) -> Loaded[Any] | str:
        name = _name(settings)
        if name not in self._checked:
            values = {key: _filled(value, self.folder) for key, value in {**self.base, **settings}.items()}
            try:
                self._checked[name] = prepare_config(self.root, values=values)
            except ConfigError as error:
                self._checked[name] = self._without_paths(str(error))
        return self._checked[name]

    def _without_paths(self, text: str) -> str:
        """Return the first line that says something, without the folder of the runs."""
        lines = text.replace(f"{self.folder}/", "").splitlines()
        return lines[1].strip() if len(lines) > 1 else lines[0]

    def _train(self, settings: Settings) -> dict[str, Any]:
        from hybridflow.trainer.ppo.build import build as build_ppo
        from hybridflow.trainer.sft.build import build as build_sft

        build: Any = build_ppo if self.root is PPOConfig else build_sft
        parts: dict[str, Any] = {name: {} for name in PARTS}
        with build(self.prepared(settings).config) as trainer:
            trainer.source.publish(0)
            for step in range(1, trainer.total_steps + 1):
                made = trainer.source.next(step)
                batch, metrics = trainer.step(made.rows, step)
                trainer.after_update(batch)
                trainer.source.publish(step)
                _note(parts, step, batch, {**made.metrics.to_floats(), **metrics.to_floats()})
            if trainer.validator is not None:
                parts["validation"] = trainer.validator(trainer.total_steps)
            parts["weights"] = _weights(trainer)
        return parts


def _name(settings: Settings) -> str:
    return json.dumps(dict(settings), sort_keys=True)


def _whole(settings: Settings, block: str) -> dict[str, Any]:
    """Return settings whose names are whole; those that begin with a dot are of the block."""
    return {f"{block}{name}" if name.startswith(".") else name: value for name, value in settings.items()}


def _filled(value: Any, folder: Path) -> Any:
    return value.replace("{folder}", str(folder)) if isinstance(value, str) else value


def _note(parts: dict[str, Any], step: int, batch: Any, values: Mapping[str, float]) -> None:
    """Enter what a step gave into the parts."""
    from hybridflow.workers.losses import LOSS_SHARES

    for part, columns in (
        ("tokens", ("responses", "response_mask", "loss_mask")),
        ("scores", ("token_level_scores", "token_level_rewards")),
        ("advantages", ("advantages", "returns")),
    ):
        parts[part][step] = [_digest(batch.batch[name]) for name in columns if name in batch]
    for name, value in values.items():
        if name.endswith(ECHOES) or name.startswith(WORK):
            continue
        part = "metrics"
        if name in LOSS_SHARES:
            part = "loss"
        elif name.endswith("/grad_norm"):
            part = "gradient"
        parts[part][f"{name} {step}"] = value


def _digest(tensor: Any) -> str:
    return sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def _weights(trainer: Any) -> list[str]:
    """Return a digest of the weights of each role that trains."""
    groups = [engine.group for engine in trainer.state.engines.values()]
    workers = [group.backend.worker(group.role) for group in groups]
    return [_digest(tensor) for worker in workers for tensor in worker.engine.module.state_dict().values()]


def differ(before: Any, after: Any) -> bool:
    """Return whether a part has moved; a number that is new, or gone, and 0 is no move."""
    if not isinstance(before, dict):
        return bool(before != after)
    return any(before.get(name, 0.0) != after.get(name, 0.0) for name in {*before, *after})


def make_inputs(folder: Path) -> None:
    """Write the models and the user's file that runs read."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    from hybridflow.models.tiny import create_tiny_model

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(CODE)
    sizes: dict[str, int] = {"hidden": 16, "layers": 1, "heads": 2, "kv_heads": 1, "intermediate": 24}
    for name, more in {"model": {}, "experts": {"experts": 4}, "teacher": {"seed": 3}}.items():
        create_tiny_model(folder / name, **sizes, **more)
        file = folder / name / "model.safetensors"
        weights = load_file(file)
        weights["model.norm.weight"] *= 8  # a policy that prefers some tokens
        save_file(weights, file, metadata={"format": "pt"})
    for name, kind, labels in (
        ("judge", AutoModelForSequenceClassification, 1),
        ("steps", AutoModelForTokenClassification, 2),
    ):
        create_tiny_model(folder / name, **sizes, seed=7)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            kind.from_pretrained(folder / name, num_labels=labels).save_pretrained(folder / name)


def verdicts(bench: Bench, keys: typing.Iterable[str] | None = None) -> Found:
    """Return the cells of keys, all that are tried where none are named, with their verdicts."""
    infos = trained_keys(bench.root)
    return {
        path: [(cell, bench.verdict(cell)) for cell in bench.cells(infos[path])]
        for path in (infos if keys is None else keys)
    }


def faults(found: Found) -> list[str]:
    """Return a line for each silent cell, and for each key that moves nothing in any of its cells."""
    lines = []
    for path, cells in found.items():
        lines += [
            f"{path}={shown(cell.value)} is silent beside {cell.context or 'the base'}"
            for cell, verdict in cells
            if verdict.kind == "silent"
        ]
        if not any(verdict.kind == "moved" for _, verdict in cells):
            lines.append(f"{path} moves nothing in any of its {len(cells)} cells")
    return lines


def silent_keys(found: Found) -> dict[str, list[str]]:
    """Return the silent cells of each key that has any, as words."""
    words = {
        path: [
            f"{shown(cell.value)}{' beside ' * bool(cell.beside)}{cell.context}"
            for cell, verdict in cells
            if verdict.kind == "silent"
        ]
        for path, cells in found.items()
    }
    return {path: each for path, each in words.items() if each}


def page(found: Found, before: Mapping[str, list[str]], commit: str) -> str:
    """Return the page: each key with what it moves, the keys that were silent before, and those not tried."""
    cells = [verdict for each in found.values() for _, verdict in each]
    counts = {kind: sum(one.kind == kind for one in cells) for kind in ("moved", "told", "refused", "silent")}
    lines = [
        "# Keys that move something",
        "",
        f"Written by `benchmarks/keys_that_move.py`. {len(found)} keys that shape a loss, a gradient, "
        f"sampled tokens or a metric, in {len(cells)} cells: a run of one process on a tiny random model, "
        f"and the same with one other value. {counts['moved']} cells moved something, in {counts['told']} a "
        f"note of `hybridflow config` tells that the key is not read, {counts['refused']} are refused, "
        f"{counts['silent']} are silent. A metric that repeats a key, or that is new and 0, is no move.",
        "",
        "| key | moves | with | else |",
        "| --- | --- | --- | --- |",
    ]
    for path, each in found.items():
        moved = [(cell, verdict) for cell, verdict in each if verdict.kind == "moved"]
        parts = dict.fromkeys(part for _, verdict in moved for part in verdict.text.split(", "))
        first = next((f"`{cell.context}`" for cell, _ in moved if cell.context), "")
        if any(not cell.context for cell, _ in moved):
            first = "alone"
        contexts = {cell.context for cell, _ in moved}
        more = f" and {len(contexts) - 1} more" if len(contexts) > 1 else ""
        first = first.replace("|", "\\|")
        others = dict.fromkeys(f"{one.kind}: {one.text}" for _, one in each if one.kind != "moved")
        told = next(iter(others), "").replace("|", "\\|")
        lines.append(f"| `{path}` | {', '.join(parts)} | {first}{more} | {told} |")
    lines += [
        "",
        f"## Silent before ({len(before)} keys, commit {commit})",
        "",
        "Another value moved nothing, was not refused, and nothing told so, alone or beside the keys named:",
        "",
        *(f"- `{path}`: {'; '.join(f'`{one}`' for one in each)}" for path, each in before.items()),
        "",
        "## Not tried",
        "",
        "| keys | because |",
        "| --- | --- |",
        *(f"| `{pattern}` | {reason} |" for pattern, reason in NOTHING.items()),
    ]
    return "\n".join(lines) + "\n"


def silent_in(checkout: Path) -> dict[str, list[str]]:
    """Return the silent keys of the sources of another checkout."""
    command = [sys.executable, __file__, "--silent"]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    silent: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return silent


def main() -> int:
    """Try all keys and write the page; with `--silent` print the silent keys as JSON in its place."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of the commit to compare with")
    parser.add_argument("--silent", action="store_true", help="print the silent keys, and write nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {**verdicts(Bench(Path(folder))), **verdicts(Bench(Path(folder), DPOConfig))}
    if options.silent:
        print(json.dumps(silent_keys(found)))
        return 0
    for line in faults(found):
        print(line)
    if options.before is not None:
        command = ["git", "-C", str(options.before), "rev-parse", "--short=8", "HEAD"]
        commit = subprocess.check_output(command, text=True)
        TARGET.write_text(page(found, silent_in(options.before), commit.strip()), encoding="utf-8")
    return int(bool(faults(found)))


if __name__ == "__main__":
    raise SystemExit(main())
