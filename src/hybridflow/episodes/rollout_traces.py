"""Converts trajectories to traces: a tree of spans each, with the attributes to search for.

scored Trajectory, its prompt row ──trace_of──► TraceSpan ──► TraceQueue ──► otel | mlflow | weave | trackio
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from hybridflow.agent.collate import GROUPS_PER_STEP
from hybridflow.config import PPOConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.observability.tracing import TraceQueue, exporter_of
from hybridflow.protocol.spans import Attribute, TraceSpan
from hybridflow.protocol.trajectory import Trajectory


class RolloutTraces:
    """Sends a trace for each trajectory that the keys choose; close it at the end of the run."""

    def __init__(self, queue: TraceQueue, config: PPOConfig, workers: int = 1) -> None:
        """`workers` is the number of processes that make trajectories, of which this is one."""
        self.queue = queue
        self._most = config.actor_rollout_ref.rollout.trace.max_samples_per_step_per_worker
        self._workers = workers
        self._step = 0
        self._run = {
            "project_name": config.trainer.project_name,
            "experiment_name": config.trainer.experiment_name,
        }

    def add(
        self, trajectories: Sequence[Trajectory], rows: Sequence[PromptRow], *, validate: bool = False
    ) -> None:
        """Send traces of scored or failed trajectories, each of the prompt row at its place."""
        for trajectory, row in zip(trajectories, rows, strict=True):
            if trajectory.spans and self._chooses(trajectory):
                facts: dict[str, Attribute] = {
                    "step": self._step_of(trajectory, validate),
                    "sample_index": row.index,
                    "rollout_n": trajectory.sample,
                    "validate": validate,
                    **self._run,
                }
                self.queue.put(trace_of(trajectory, facts, with_texts=self.queue.takes_texts))

    def close(self) -> None:
        """Wait, not for long, until all is sent."""
        self.queue.close()

    def _chooses(self, trajectory: Trajectory) -> bool:
        """Return whether the group is among the first of its step that this process makes."""
        place = trajectory.group % GROUPS_PER_STEP
        return self._most is None or place // self._workers < self._most

    def _step_of(self, trajectory: Trajectory, validate: bool) -> int:
        """Return the step of a validation, or the one that trained, or was to train, when it was begun."""
        if validate:
            return trajectory.group // GROUPS_PER_STEP
        for span in trajectory.spans:
            version = span.attributes.get("version_first")
            if isinstance(version, int) and version >= 0:
                self._step = version + 1
                break
        return self._step or trajectory.group // GROUPS_PER_STEP


def rollout_traces(config: PPOConfig, tokenizer: Tokenizer, workers: int = 1) -> RolloutTraces | None:
    """Return the traces of a run, or None where `rollout.trace.backend` is not set."""
    keys = config.actor_rollout_ref.rollout.trace
    if keys.backend is None:
        return None
    decode: Callable[[Sequence[int]], str] | None = None
    if keys.token2text:
        own = copy.deepcopy(tokenizer)  # for its thread alone

        def text_of(token_ids: Sequence[int]) -> str:
            return str(own.decode(list(token_ids)))

        decode = text_of
    trainer = config.trainer
    folder = trainer.default_local_dir
    build = exporter_of(keys, trainer.project_name, trainer.experiment_name, folder)
    return RolloutTraces(TraceQueue(keys.backend, build, decode), config, workers)


def trace_of(trajectory: Trajectory, facts: Mapping[str, Attribute], *, with_texts: bool) -> TraceSpan:
    """Return the tree of a trajectory's spans, whose root has `facts` and its outcome."""
    prompt: Sequence[int] = ()
    response: Sequence[int] = ()
    if trajectory.lineages:
        prompt = trajectory.lineages[0].prompt.token_ids
        response = trajectory.lineages[-1].response_ids
    attributes: dict[str, Attribute] = {
        **facts,
        "outcome": trajectory.outcome.kind,
        "turns": trajectory.turns,
        "prompt_tokens": len(prompt),
        "response_tokens": len(trajectory.sampled_ids),
    }
    versions = [
        version
        for lineage in trajectory.lineages
        for segment in lineage.segments
        if segment.versions
        for version in (segment.versions[0], segment.versions[-1])
    ]
    if versions:
        attributes |= {"version_first": min(versions), "version_last": max(versions)}
    if trajectory.reward is not None:
        attributes["reward"] = trajectory.reward
    error = ""
    if trajectory.outcome.cause is not None:
        error = f"{trajectory.outcome.cause}: {trajectory.outcome.detail}"
        attributes["cause"] = trajectory.outcome.cause
    root = TraceSpan(
        "trajectory",
        min(span.start for span in trajectory.spans),
        max(span.end for span in trajectory.spans),
        attributes,
        {"prompt_text": prompt, "response_text": response},
        error,
        with_turns(trajectory.spans),
    )
    return _held(root, with_texts)


def with_turns(spans: Sequence[TraceSpan]) -> tuple[TraceSpan, ...]:
    """Return spans in the order of their starts. Each call of a conversation and what follows it, up to the
    next call, are below a span `turn`; a single call, and a reward, stand alone.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    if sum(span.name != "reward" for span in ordered) <= 1:
        return tuple(ordered)
    before: list[TraceSpan] = []
    turns: list[list[TraceSpan]] = []
    after: list[TraceSpan] = []
    for span in ordered:
        if span.name == "generate":
            turns.append([span])
        elif span.name == "reward" or span.attributes.get("method") == "score":
            after.append(span)
        elif turns:
            turns[-1].append(span)
        else:
            before.append(span)
    grouped = [_turn(number, parts) for number, parts in enumerate(turns)]
    return tuple(chain(before, grouped, after))


def _turn(number: int, parts: Sequence[TraceSpan]) -> TraceSpan:
    end = max(part.end for part in parts)
    return TraceSpan("turn", parts[0].start, end, {"turn": number}, children=tuple(parts))


def _held(span: TraceSpan, with_texts: bool) -> TraceSpan:
    """Return a span as it may wait: token ids take four bytes each, or nothing where no text is sent."""
    texts: dict[str, str | Sequence[int]] = {}
    if with_texts:
        texts = {
            name: text if isinstance(text, str) else array("i", text) for name, text in span.texts.items()
        }
    children = tuple(_held(child, with_texts) for child in span.children)
    return replace(span, texts=texts, children=children)
