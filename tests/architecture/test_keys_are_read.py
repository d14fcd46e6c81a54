"""No dead keys: each key of the schema is read, by its whole path, in the code outside `config/`.

The blocks that an expression may stand for are followed through annotations, assignments and attributes: of
`def train(optim: OptimConfig)` every optimizer's block, of `config.critic.optim` the critic's alone.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cache

import pytest
from sources import Source, sources

from hybridflow.algorithms.catalog import ESTIMATORS, POLICY_LOSSES
from hybridflow.config import RUNS
from hybridflow.config.tree import arguments_of_keys, field_of, keys_of, type_hints

pytestmark = pytest.mark.xdist_group("sources")  # parsed once

# Keys that act while the configuration is made or checked, and nowhere else.
READ_IN_CONFIG = {
    "actor_rollout_ref.model.tokenizer_path": "resolve: becomes data.tokenizer",
    "model.tokenizer_path": "resolve: becomes data.tokenizer",
    "critic.model.tokenizer_path": "check: the critic reads the actor's token ids",
    "reward.process_reward_model.model.tokenizer_path": (
        "resolve: the process reward model reads the actor's token ids"
    ),
    "distillation.teacher_model.tokenizer_path": "resolve: the teacher reads the actor's token ids",
    "distillation.enabled": "check: whether something reads a teacher",
    "distillation.distillation_loss.use_policy_gradient": "its relations: whether loss_mode is one",
    "actor_rollout_ref.actor.strategy": "megatron: STRATEGIES, by which roles are built and planned",
    "critic.strategy": "megatron: STRATEGIES, by which roles are built and planned",
    "trainer.on_missing": "load: whether what this machine lacks is refused or replaced",
    **dict.fromkeys(
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size",
            "actor_rollout_ref.ref.ulysses_sequence_parallel_size",
            "critic.ulysses_sequence_parallel_size",
            "reward.reward_model.ulysses_sequence_parallel_size",
        ),
        "roles: engine_keys gives it out",
    ),
}
Places = frozenset[tuple[type, str]]
"""Blocks of keys as (class of the root, dotted path)."""
NOWHERE: Places = frozenset()


def field_path(path: str) -> str:
    """The dotted path with the names of the fields: `trainer.async_.run_ahead`."""
    return ".".join(field_of(name) for name in path.split("."))


def blocks(cls: type, root: type, path: str = "") -> Iterator[tuple[type, tuple[type, str]]]:
    """Each block of a configuration class: (its own class, its place)."""
    yield cls, (root, path)
    for name, hint in type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            yield from blocks(hint, root, f"{path}.{name}".strip("."))  # type: ignore[arg-type]


BLOCKS = [found for root in RUNS.values() for found in blocks(root, root)]
PLACES = {place for _, place in BLOCKS}
BOUNDS = {"C": ("PPOConfig", "SFTConfig")}
"""Type variables of configurations."""


@cache
def returns() -> dict[str, ast.expr | None]:
    """What functions return, by name."""
    return {
        node.name: node.returns
        for source in sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef)
    }


class Reads(ast.NodeVisitor):
    """The keys that one file reads, by place and name."""

    def __init__(self, source: Source) -> None:
        self.found: set[tuple[type, str]] = set()
        self.known: dict[str, Places] = {}
        for _ in range(2):  # what a class keeps may be read above the method that sets it
            self.visit(source.tree)

    def annotated(self, annotation: ast.expr | None) -> Places:
        """The places of the configuration classes that an annotation names."""
        if annotation is None:
            return NOWHERE
        names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        names |= {part for name in names for part in BOUNDS.get(name, ())}
        return frozenset(
            place for cls, place in BLOCKS if names & {parent.__name__ for parent in cls.__mro__}
        )

    def places(self, node: ast.expr) -> Places:
        """The blocks that an expression may stand for."""
        if isinstance(node, ast.BoolOp):
            return NOWHERE.union(*map(self.places, node.values))
        if isinstance(node, ast.Attribute):
            inner = {(root, f"{path}.{node.attr}".strip(".")) for root, path in self.places(node.value)}
            return frozenset(inner & PLACES) or self.known.get(f".{node.attr}", NOWHERE)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.annotated(returns().get(node.func.id))
        return self.known.get(node.id, NOWHERE) if isinstance(node, ast.Name) else NOWHERE

    def learn(self, target: ast.expr, places: Places) -> None:
        """Note what a name, or an attribute of an object, stands for."""
        if isinstance(target, ast.Attribute):
            self.known[f".{target.attr}"] = self.known.get(f".{target.attr}", NOWHERE) | places
        elif isinstance(target, ast.Name):
            self.known[target.id] = self.known.get(target.id, NOWHERE) | places

    def visit_arg(self, node: ast.arg) -> None:
        self.known[node.arg] = self.known.get(node.arg, NOWHERE) | self.annotated(node.annotation)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        places = self.annotated(node.annotation)
        self.learn(node.target, places)
        if isinstance(node.target, ast.Name):  # a field of a dataclass
            self.known[f".{node.target.id}"] = self.known.get(f".{node.target.id}", NOWHERE) | places
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                self.learn(part, self.places(node.value))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            for name in (arg for arg in node.args if isinstance(arg, ast.Constant)):
                self.read(node.args[0], str(name.value))
        self.generic_visit(node)

    def read(self, of: ast.expr, name: str) -> None:
        """Note that a key is read of what an expression stands for."""
        self.found |= {(root, f"{path}.{name}".strip(".")) for root, path in self.places(of)}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.read(node.value, node.attr)
        self.generic_visit(node)


def test_each_key_is_read() -> None:
    read: set[tuple[type, str]] = set()
    for source in sources():
        if source.room != "config":
            read |= Reads(source).found
    arguments = {name for facts in (*ESTIMATORS.values(), *POLICY_LOSSES.values()) for name in facts.reads}
    unread = [
        path
        for root in RUNS.values()
        for path in keys_of(root)
        if path not in READ_IN_CONFIG
        and (root, field_path(path)) not in read
        and not arguments & arguments_of_keys(root).get(path, frozenset())
    ]
    assert not unread, f"keys that nothing reads: {unread}"
