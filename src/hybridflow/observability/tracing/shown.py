"""How spans are shown, in the same way by every viewer: a title, what went in, what came out, and facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from hybridflow.protocol.spans import Attribute, TraceSpan


INPUTS = ("prompt_text", "arguments")
"""Texts that a span reads."""
OUTPUTS = ("response_text", "answer", "reward", "score", "outcome", "finish_reason")
"""Texts and facts that come of it."""
TAGS = ("step", "sample_index", "rollout_n", "validate", "experiment_name")
"""Facts of a trajectory by which verl's users look it up."""


class Shown(NamedTuple):
    """The attributes of a span by their parts."""

    inputs: dict[str, Attribute]
    outputs: dict[str, Attribute]
    facts: dict[str, Attribute]


def title_of(span: TraceSpan) -> str:
    """Return the name that a viewer shows: with the tool, or the method of the environment."""
    detail = span.attributes.get("tool") or span.attributes.get("method")
    return f"{span.name} {detail}" if detail else span.name


def parts_of(span: TraceSpan) -> Shown:
    """Return what a span read, what came of it, and all other facts."""
    inputs = _some(span.attributes, INPUTS)
    outputs = _some(span.attributes, OUTPUTS)
    facts = {name: value for name, value in span.attributes.items() if name not in (*INPUTS, *OUTPUTS)}
    return Shown(inputs, outputs, facts)


def tags_of(trace: TraceSpan) -> dict[str, str]:
    """Return the facts by which a trace is found, as texts."""
    return {name: str(value) for name, value in _some(trace.attributes, TAGS).items()}


def _some(attributes: Mapping[str, Attribute], names: tuple[str, ...]) -> dict[str, Attribute]:
    return {name: attributes[name] for name in names if name in attributes}
