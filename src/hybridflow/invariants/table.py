"""All properties by name, and their results put together."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybridflow.invariants import advantages, distributions, losses, runs
from hybridflow.invariants.adapter import OPERATIONS, AdapterError
from hybridflow.invariants.checking import Property, PropertyOutcome, Status

PROPERTIES = {
    value.name: value
    for module in (advantages, losses, distributions, runs)
    for value in vars(module).values()
    if isinstance(value, Property)
}


def chosen(names: Sequence[str] | None) -> list[Property]:
    """Return the properties of these names, or of operations (`kl`) of these names; None means all.

    Raises AdapterError for a name that is neither.
    """
    if names is None:
        return list(PROPERTIES.values())
    known = [*PROPERTIES, *OPERATIONS]
    for name in names:
        if name not in known:
            near = ", ".join(difflib.get_close_matches(name, known)) or ", ".join(OPERATIONS)
            raise AdapterError(f"--only {name}: there is no such property or operation; there is {near}, …")
    return [each for each in PROPERTIES.values() if each.name in names or each.operation in names]


@dataclass(frozen=True)
class PropertySummary:
    """The results of a property with all of its kinds."""

    tried: Property
    outcomes: tuple[PropertyOutcome, ...]

    def kinds(self, status: Status) -> list[str]:
        """Return the kinds with this status; one empty text where the property has no kinds."""
        return [each.kind for each in self.outcomes if each.status == status]

    @property
    def status(self) -> Status:
        """Failed where a kind failed, else held where a kind held."""
        statuses: tuple[Status, ...] = ("failed", "held", "not offered")
        return next(status for status in statuses if self.kinds(status))

    @property
    def text(self) -> str:
        """The status, with the kinds that have it and those that have another one."""
        if not self.outcomes[0].kind:
            return self.status
        found: list[Status] = ["held", "failed", "not offered"]
        parts = [f"{status}: {', '.join(self.kinds(status))}" for status in found if self.kinds(status)]
        return self.status if self.status == "not offered" else "; ".join(parts)


def summaries(outcomes: Iterable[PropertyOutcome]) -> list[PropertySummary]:
    """Return outcomes by property, in their order."""
    found: dict[str, list[PropertyOutcome]] = {}
    for each in outcomes:
        found.setdefault(each.property, []).append(each)
    return [PropertySummary(PROPERTIES[name], tuple(own)) for name, own in found.items()]
