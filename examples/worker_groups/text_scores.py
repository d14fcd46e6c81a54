"""Texts are scored by data-parallel workers: worker groups without any model or training.

texts ──rows──► a Scorer in each process ──scores──► one batch, in the order of the texts
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from hybridflow import DataProto
from hybridflow.config.cluster import RayConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.controller import Dispatch, RankInfo, Worker, WorkerGroup, register
from hybridflow.controller.build import data_parallel, hosting
from hybridflow.observability.metrics import Metrics

TEXTS = ["one two three", "four", "five six", "", "seven eight nine ten"]


class Scorer(Worker):
    """Scores texts by the words that it knows."""

    def __init__(self, known: set[str]) -> None:
        self.known = known

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def score(self, batch: DataProto, value: Callable[[str], float]) -> DataProto:
        """Return scores [B] float32: the sum of `value` over the known words of each text."""
        scores = []
        for text in batch.non_tensor_batch["text"]:
            scores.append(sum(value(word) for word in text.split() if word in self.known))
        return DataProto.from_dict({"scores": torch.tensor(scores, dtype=torch.float32)})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS)
    def measure(self, batch: DataProto) -> Metrics:
        """Return the mean number of words of a text, and the number of texts."""
        words = [len(text.split()) for text in batch.non_tensor_batch["text"]]
        metrics = Metrics()
        metrics.add_mean("words", sum(words), len(words))
        metrics.add_sum("texts", len(words))
        return metrics

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def place(self) -> str:
        """Return the place of this worker among those of its role."""
        return f"rank {self.rank} of {self.world_size}"

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def known_words(self) -> list[str]:
        """Return the known words, of which all workers have the same."""
        return sorted(self.known)


def build_scorer(info: RankInfo) -> Scorer:
    """Build the worker of one rank, in its process: the place to load what is large."""
    return Scorer({"one", "four", "six"})


def main(controller: str, processes: int) -> None:
    """Score TEXTS under `controller`, local or ray, and print what the workers return."""
    devices = TrainerConfig(controller=controller, n_gpus_per_node=processes, device="cpu")
    with hosting(devices, RayConfig(), ["scorer"]) as start:
        backend = start(lambda process: {"scorer": build_scorer}, data_parallel)
        scorers = WorkerGroup[Scorer](backend, "scorer")
        print("workers:", scorers.call_list(Scorer.place))
        print("known words:", scorers.call(Scorer.known_words))
        batch = DataProto.from_dict({}, {"text": TEXTS})
        letters = scorers.submit(Scorer.score, batch, lambda word: float(len(word)))
        words = scorers.submit(Scorer.score, batch, lambda word: 1.0)
        print("letters:", letters.result(timeout=600).batch["scores"].tolist())
        print("words:", words.result(timeout=600).batch["scores"].tolist())
        print("metrics:", scorers.call(Scorer.measure, batch).to_floats())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
