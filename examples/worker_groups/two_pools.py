"""Two roles on two resource pools: their calls overlap, and results go from process to process.

teacher ──weights, by reference──► student;    batch ──► teacher │ student, at the same time ──► distance
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from hybridflow import DataProto
from hybridflow.config.cluster import RayConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.controller import Dispatch, Worker, WorkerGroup, register
from hybridflow.controller.build import data_parallel, hosting


class Linear(Worker):
    """Holds a weight, and multiplies rows by it."""

    def __init__(self, weight: float) -> None:
        self.weight = torch.tensor([weight])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, reads=("x",), writes=("y",))
    def apply(self, batch: DataProto) -> DataProto:
        """Return y [B] float32."""
        return DataProto.from_dict({"y": batch.batch["x"] * self.weight})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> dict[str, Tensor]:
        """Return the weight."""
        return {"weight": self.weight}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def take(self, weights: dict[str, Tensor]) -> None:
        """Take over a weight; what arrives belongs to the driver, so it is copied."""
        self.weight = weights["weight"].clone()

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def process(self) -> int:
        """Return the number of this worker's process."""
        return os.getpid()


def distance(teacher: WorkerGroup[Linear], student: WorkerGroup[Linear], batch: DataProto) -> float:
    """Let both work at the same time; return how far their results are apart."""
    taught = teacher.submit(Linear.apply, batch)
    learned = student.submit(Linear.apply, batch)
    return float((taught.result().batch["y"] - learned.result().batch["y"]).abs().mean())


def main(controller: str) -> None:
    """Start a teacher and a student under `controller`, local or ray, and make them equal."""
    pools = {"large": [1], "small": [1]}
    trainer = TrainerConfig(
        controller=controller, resource_pools=pools, placement={"student": "small"}, device="cpu"
    )
    with hosting(trainer, RayConfig(), ["teacher", "student"]) as start:
        make = {"teacher": lambda info: Linear(3.0), "student": lambda info: Linear(1.0)}
        backend = start(lambda process: make, data_parallel)
        teacher = WorkerGroup[Linear](backend, "teacher")
        student = WorkerGroup[Linear](backend, "student")
        batch = DataProto.from_dict({"x": torch.arange(4.0)})
        print("processes:", len({teacher.call(Linear.process), student.call(Linear.process)}))
        print("before:", distance(teacher, student, batch))
        student.call(Linear.take, teacher.submit(Linear.weights).by_reference())
        print("after:", distance(teacher, student, batch))


if __name__ == "__main__":
    main(sys.argv[1])
