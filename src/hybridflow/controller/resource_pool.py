"""Which role lives on which devices: pools name devices, a placement maps roles to pools.

Colocated (one pool for all roles) is the default; split roles and standalone rollouts are placements with several pools.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hybridflow.errors import ConfigError


@dataclass(frozen=True)
class ResourcePool:
    """Some devices under a name, for example `ResourcePool("train", ("cuda:0", "cuda:1"))`."""

    name: str
    devices: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError(f"resource pool {self.name!r} has no devices: give it at least one")
        if len(set(self.devices)) < len(self.devices):
            raise ConfigError(f"resource pool {self.name!r} names a device twice: {', '.join(self.devices)}")

    @property
    def world_size(self) -> int:
        """Ranks of each role in this pool: one a device."""
        return len(self.devices)


@dataclass(frozen=True)
class Placement:
    """Roles on pools. Roles of one pool are colocated: one process for each device hosts them all."""

    pools: tuple[ResourcePool, ...]
    pool_of_role: Mapping[str, str]
    """Name of the pool of each role."""

    def __post_init__(self) -> None:
        names = [pool.name for pool in self.pools]
        if len(set(names)) < len(names):
            raise ConfigError(f"two resource pools share a name: {', '.join(names)}")
        for role, pool in self.pool_of_role.items():
            if pool not in names:
                raise ConfigError(f"role {role!r} is placed on pool {pool!r}, which does not exist: the pools are {', '.join(names)}")
        owner: dict[str, str] = {}
        for each in self.pools:
            for device in each.devices:
                if device in owner:
                    raise ConfigError(f"device {device} is in two resource pools, {owner[device]!r} and {each.name!r}: give it to one")
                owner[device] = each.name

    @classmethod
    def colocated(cls, roles: Iterable[str], devices: Sequence[str], *, pool: str = "global") -> Placement:
        """All roles on all devices."""
        return cls((ResourcePool(pool, tuple(devices)),), dict.fromkeys(roles, pool))

    def pool(self, role: str) -> ResourcePool:
        """The pool on which a role lives."""
        assert role in self.pool_of_role, f"role {role!r} has no place: the roles are {sorted(self.pool_of_role)}"
        return next(pool for pool in self.pools if pool.name == self.pool_of_role[role])

    def roles(self, pool: str) -> list[str]:
        """The roles that share a pool."""
        return [role for role, name in self.pool_of_role.items() if name == pool]

    def check(self, available: Sequence[str]) -> None:
        """Refuse before anything is allocated: ConfigError where more devices are asked for than there are, or others."""
        wanted = [device for pool in self.pools for device in pool.devices]
        sizes = " + ".join(f"{pool.name} {pool.world_size}" for pool in self.pools)
        if len(wanted) > len(available):
            raise ConfigError(
                f"the resource pools ask for {len(wanted)} devices ({sizes}) but there are {len(available)} "
                f"({', '.join(available) or 'none'}): lower trainer.nnodes or trainer.n_gpus_per_node, or colocate the roles"
            )
        odd = [device for device in wanted if device not in available]
        if odd:
            raise ConfigError(f"the resource pools name {', '.join(odd)}, which is not there: there are {', '.join(available)}")

    def check_local(self) -> None:
        """Refuse what the local backend cannot host: ConfigError for a pool of several devices."""
        for pool in self.pools:
            if pool.world_size > 1:
                raise ConfigError(
                    f"trainer.controller=local runs one rank a role, but pool {pool.name!r} has {pool.world_size} devices "
                    f"({', '.join(pool.devices)}): set trainer.nnodes=1 and trainer.n_gpus_per_node=1"
                )
