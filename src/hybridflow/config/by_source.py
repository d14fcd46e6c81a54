"""`algorithm.by_source`: the algorithm of each data source that has its own.

algorithm ──sources_of──► {source: its entry}
algorithm ──algorithms_of──► {None: the run's, source: the run's with the keys of the entry}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from hybridflow.config.algorithm import AlgorithmConfig, SourceConfig
from hybridflow.config.convert import convert_what_fits, raise_all
from hybridflow.config.relations import shown

OWN_KEYS = ("kl_loss_coef", "weight")
"""The keys of an entry that are none of `algorithm`."""


def sources_of(algorithm: AlgorithmConfig) -> dict[str, SourceConfig]:
    """Return the entries by data source. Raises ConfigError that lists every unknown key and wrong value."""
    problems: list[str] = []
    entries: dict[str, SourceConfig] = {}
    for source, tree in algorithm.by_source.items():
        found: list[str] = []
        if isinstance(tree, Mapping):
            entries[source] = convert_what_fits(SourceConfig, tree, found, set())
        else:
            found.append(f"got {shown(tree)}, wanted keys and values, for example {{adv_estimator: rloo}}")
        problems += [f"algorithm.by_source, {source}: {line}" for line in found]
    raise_all(problems)
    return entries


def algorithms_of(algorithm: AlgorithmConfig) -> dict[str | None, AlgorithmConfig]:
    """Return the algorithm of each data source with an entry, and under None that of all other rows."""
    found: dict[str | None, AlgorithmConfig] = {None: algorithm}
    for source, entry in sources_of(algorithm).items():
        own = {each.name: getattr(entry, each.name) for each in fields(entry) if each.name not in OWN_KEYS}
        found[source] = replace(
            algorithm, **{name: value for name, value in own.items() if value is not None}
        )
    return found
