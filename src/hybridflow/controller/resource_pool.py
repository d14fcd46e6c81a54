"""The devices of each role: pools are sets of devices, and a placement maps roles to pools.

    trainer.resource_pools: {train: [2, 2], rollout: [4]}   train has two nodes with two devices each, rollout
                                                            has one node with four
    trainer.placement: {rollout: rollout}                   all other roles are in the first pool, train

Without these keys there is one pool for all roles, `global`, with all devices
(`trainer.nnodes` × `trainer.n_gpus_per_node`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.config.layout import COLLECTORS
from hybridflow.config.trainer import SFTTrainerConfig, TrainerConfig
from hybridflow.controller.worker import RankInfo
from hybridflow.errors import ConfigError

COLLECTOR = "collector"
"""The role whose `trainer.num_collectors` processes have no device, in a separate pool."""
SPANNING = "rollout"
"""The only role that may be in several pools, because its ranks generate independently of each other."""


@dataclass(frozen=True)
class ResourcePool:
    """A named set of devices; `ResourcePool("train", (4, 4))` has two nodes with four devices each."""

    name: str
    devices_per_node: tuple[int, ...]
    has_devices: bool = True
    """Whether each process has a device; False: only a place on a CPU that others use too, on any nodes."""

    def __post_init__(self) -> None:
        assert self.devices_per_node and min(self.devices_per_node) > 0, (
            f"resource pool {self.name!r} has a node without devices: {self.devices_per_node}"
        )

    @property
    def world_size(self) -> int:
        """The number of devices, and so of the processes and of each role's ranks in this pool."""
        return sum(self.devices_per_node)


def pools_of(trainer: TrainerConfig | SFTTrainerConfig) -> tuple[ResourcePool, ...]:
    """Return the pools that the configuration asks for."""
    if isinstance(trainer, TrainerConfig) and trainer.resource_pools:
        return tuple(ResourcePool(name, tuple(counts)) for name, counts in trainer.resource_pools.items())
    return (ResourcePool("global", (trainer.n_gpus_per_node,) * trainer.nnodes),)


@dataclass(frozen=True)
class Placement:
    """The pools of each role. Roles of one pool are colocated: one process for each device hosts them all.

    Raises ConfigError for a pool that no role uses, and for any role but the rollout in several pools. That
    all pools exist and have devices was checked with the keys (`config/layout.py`).
    """

    pools: tuple[ResourcePool, ...]
    pools_of_role: Mapping[str, tuple[str, ...]]
    """The names of each role's pools; only the rollout may have several."""

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        assert len(set(names)) == len(names), f"two resource pools share a name: {', '.join(names)}"
        for role, pools in self.pools_of_role.items():
            _check_pools(role, pools, names)
        unused = [name for name in names if not self.roles(name)]
        if unused:
            raise ConfigError(
                f"no role lives on resource pool {', '.join(unused)}, so its devices would stand idle: give "
                "it a role by trainer.placement (the roles of this run are "
                f"{', '.join(self.pools_of_role)}), or take it out of trainer.resource_pools"
            )

    @classmethod
    def colocated(
        cls, roles: Iterable[str], devices_per_node: Sequence[int], *, pool: str = "global"
    ) -> Placement:
        """Return the placement of all roles on all devices of one pool."""
        return cls((ResourcePool(pool, tuple(devices_per_node)),), dict.fromkeys(roles, (pool,)))

    @classmethod
    def from_config(cls, trainer: TrainerConfig | SFTTrainerConfig, roles: Sequence[str]) -> Placement:
        """Return the placement that the configuration asks for.

        Roles that `trainer.placement` does not name are in the first pool.
        """
        pools = pools_of(trainer)
        if isinstance(trainer, SFTTrainerConfig):
            return cls(pools, dict.fromkeys(roles, (pools[0].name,)))
        strange = [role for role in trainer.placement if role not in roles]
        if strange:
            raise ConfigError(
                f"trainer.placement.{strange[0]} names a role that this run does not have: its roles are "
                f"{', '.join(roles)}{_nearest(strange[0], roles)}"
            )
        pools_of_role: dict[str, tuple[str, ...]] = dict.fromkeys(roles, (pools[0].name,))
        for role, names in trainer.placement.items():
            if isinstance(names, str):
                names = [names]
            pools_of_role[role] = tuple(names)
        if COLLECTOR in roles:
            pools = (*pools, ResourcePool(COLLECTORS, (trainer.num_collectors,), has_devices=False))
            pools_of_role[COLLECTOR] = (pools[-1].name,)
        return cls(pools, pools_of_role)

    @property
    def device_pools(self) -> tuple[ResourcePool, ...]:
        """The pools whose processes have devices."""
        return tuple(pool for pool in self.pools if pool.has_devices)

    @property
    def num_devices(self) -> int:
        """The number of devices of all pools; each has one process."""
        return sum(pool.world_size for pool in self.device_pools)

    def pools_of(self, role: str) -> tuple[ResourcePool, ...]:
        """Return a role's pools, in the order of its ranks."""
        assert role in self.pools_of_role, (
            f"role {role!r} has no place: the roles are {sorted(self.pools_of_role)}"
        )
        return tuple(
            next(pool for pool in self.pools if pool.name == name) for name in self.pools_of_role[role]
        )

    def without(self, *roles: str) -> Placement:
        """Return the placement of the other roles, without the pools that are these roles' alone."""
        others = {other: names for other, names in self.pools_of_role.items() if other not in roles}
        used = {name for names in others.values() for name in names}
        return Placement(tuple(pool for pool in self.pools if pool.name in used), others)

    def replicas(self, role: str, width: int) -> list[Placement]:
        """Return a placement for each `width` devices of a role's pools, none of them on two nodes.

        `width` divides the devices of each node, which was checked with the keys.
        """
        number = sum(count // width for pool in self.pools_of(role) for count in pool.devices_per_node)
        return [Placement.colocated((role,), (width,), pool=f"{role}-{place}") for place in range(number)]

    def ranks(self, role: str) -> list[tuple[str, int]]:
        """Return, for each rank of a role, its pool and its rank in that pool."""
        return [(pool.name, rank) for pool in self.pools_of(role) for rank in range(pool.world_size)]

    def roles(self, pool: str) -> list[str]:
        """Return the roles that share a pool."""
        return [role for role, names in self.pools_of_role.items() if pool in names]

    def infos(self, pool: str, rank: int) -> dict[str, RankInfo]:
        """Return the rank information of each role's worker in one process of a pool."""
        found = {}
        for role in self.roles(pool):
            ranks = self.ranks(role)
            found[role] = RankInfo(role, ranks.index((pool, rank)), len(ranks))
        return found

    def are_colocated(self, role: str, other: str) -> bool:
        """Return whether two roles share a process anywhere, so that their calls cannot overlap."""
        return bool({*self.pools_of_role[role]} & {*self.pools_of_role[other]})


def _check_pools(role: str, pools: tuple[str, ...], names: Sequence[str]) -> None:
    key = f"trainer.placement.{role}"
    assert pools and {*pools} <= {*names}, f"role {role!r} is placed on {pools}, and there are {names}"
    if len(set(pools)) < len(pools):
        raise ConfigError(f"{key} names a pool twice: {', '.join(pools)}")
    if len(pools) > 1 and role != SPANNING:
        raise ConfigError(
            f"role {role!r} is placed on {len(pools)} pools ({', '.join(pools)}), but only the {SPANNING} "
            f"may be, whose ranks work independently: set {key} to one of them"
        )


def _nearest(name: str, known: Sequence[str]) -> str:
    for near in difflib.get_close_matches(name, known, n=1):
        return f"; did you mean {near}?"
    return ""
