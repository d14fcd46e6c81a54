"""π by throwing darts in many processes, with a dispatch rule of its own.

darts ──share──► the count of each rank ──throw──► hits of each rank ──add_up──► hits
"""

from __future__ import annotations

import random
import sys
from typing import Any

from hybridflow.config.cluster import RayConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.controller import Call, Dispatch, MeshInfo, ShardedCall, Worker, WorkerGroup, register
from hybridflow.controller.build import data_parallel, hosting


def share(call: Call, mesh: MeshInfo) -> ShardedCall:
    """Split the first argument, a count, over the ranks; all other arguments go to every rank."""
    count, *others = call.args
    calls: list[Call | None] = []
    for rank in range(mesh.world_size):
        mine = count // mesh.world_size + (rank < count % mesh.world_size)
        calls.append(Call((mine, *others), call.kwargs))
    return ShardedCall(calls)


def add_up(results: list[Any], mesh: MeshInfo, sharded: ShardedCall) -> Any:
    """Return the sum of the results of all ranks."""
    return sum(results)


SHARED = Dispatch("SHARED", share, add_up, gives="merged")


class Thrower(Worker):
    """Throws darts at a square with a quarter of a circle in it."""

    @register(dispatch_mode=SHARED)
    def throw(self, darts: int, seed: int) -> int:
        """Return how many of the darts have hit; each rank draws from a stream of its own."""
        draw = random.Random(f"{seed} {self.rank}")
        return sum(draw.random() ** 2 + draw.random() ** 2 < 1 for _ in range(darts))


def main(controller: str, processes: int, darts: int = 200_000) -> None:
    """Throw the darts under `controller`, local or ray, and print the estimate."""
    devices = TrainerConfig(controller=controller, n_gpus_per_node=processes, device="cpu")
    with hosting(devices, RayConfig(), ["thrower"]) as start:
        backend = start(lambda process: {"thrower": lambda info: Thrower()}, data_parallel)
        throwers = WorkerGroup[Thrower](backend, "thrower")
        hits = throwers.call(Thrower.throw, darts, 1)
    print(f"{throwers.role}: {hits} of {darts} darts, so π is about {4 * hits / darts:.3f}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
