"""The workload of `controller_overhead.py`: the calls of a GRPO step on workers that compute nothing, and
ranks without processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hybridflow.algorithms.aggregation import LossScale
from hybridflow.controller import (
    Call,
    Dispatch,
    Factories,
    MeshInfo,
    Part,
    RankInfo,
    Worker,
    WorkerGroup,
    WorkerHost,
    register,
)
from hybridflow.controller.dispatch import Lane
from hybridflow.controller.local import in_memory
from hybridflow.controller.mesh import cut_items, plan_items
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto
from hybridflow.workers.mini_batches import MiniBatchPlan, add_update, mini_batches

R = TypeVar("R")

RESPONSES = 8
"""A prompt."""
MINI_BATCHES = 4
"""A step."""


@dataclass(frozen=True)
class Request:
    """A prompt to be answered; dealt with the others of its prompt."""

    number: int
    prompt_token_ids: tuple[int, ...]
    deal_key: int
    deal_cost: float


class TinyWorker(Worker):
    """Answers at once, and counts the seconds that it worked."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def generate(self, requests: Sequence[Request], *, policy_version: int) -> list[list[int]]:
        return self._timed(lambda: [[policy_version] for _ in requests])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def log_probs(self, batch: DataProto, *, name: str) -> DataProto:
        return self._timed(lambda: DataProto.from_dict({name: torch.zeros(batch.batch["responses"].shape)}))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRICS)
    def update_mini_batch(self, batch: DataProto, *, scale: LossScale) -> Metrics:
        return self._timed(lambda: _some_metrics(len(batch)))

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def take_seconds(self) -> float:
        """Return the time of the calls since the last time."""
        seconds = self.seconds
        self.seconds = 0.0
        return seconds

    def _timed(self, work: Callable[[], R]) -> R:
        began = time.perf_counter()
        result = work()
        self.seconds += time.perf_counter() - began
        return result


def _some_metrics(rows: int) -> Metrics:
    metrics = Metrics()
    for index in range(12):  # about as many as an actor reports
        metrics.add_mean(f"actor/metric_{index}", torch.tensor(1.0), float(rows))
    return metrics


class TinyGroup(WorkerGroup[TinyWorker]):
    """The calls of a step, as the typed groups of the package make them."""

    def generate(self, requests: Sequence[Request], step: int) -> None:
        parts = cut_items(requests, plan_items(requests, self.mesh))
        answers = [
            self.call_one(rank, TinyWorker.generate, part, policy_version=step)
            for rank, part in zip(self.mesh.leaders, parts, strict=True)
        ]
        for answer in answers:
            answer.result()

    def log_probs(self, batch: DataProto, name: str) -> DataProto:
        return self.call(
            TinyWorker.log_probs,
            batch.select(["input_ids", "attention_mask", "responses", "response_mask"], []),
            name=name,
        )

    def update(self, batch: DataProto, step: int) -> Metrics:
        prompts = len(batch) // RESPONSES
        columns = [
            "input_ids",
            "attention_mask",
            "responses",
            "response_mask",
            "loss_mask",
            "old_log_probs",
            "advantages",
        ]
        plan = MiniBatchPlan(max(1, prompts // MINI_BATCHES), 1, True, 0, step)
        metrics = Metrics()
        for mini, scale in mini_batches(batch.select(columns, ["uid"]), plan, metrics, name="actor"):
            add_update(metrics, self.call(TinyWorker.update_mini_batch, mini, scale=scale))
        return metrics


def make_tiny(host: WorkerHost) -> Factories:
    """The three roles of GRPO, in one process."""

    def tiny(info: RankInfo) -> TinyWorker:
        return TinyWorker()

    return {"actor": tiny, "rollout": tiny, "reference": tiny}


@dataclass(frozen=True)
class Work:
    """Return the data of a step: prompts, and the rows that generation would make of them."""

    requests: list[Request]
    batch: DataProto


def make_work(prompts: int, prompt_width: int, response_width: int) -> Work:
    """RESPONSES rows a prompt with log-normal lengths (mean 0.4 of the longest)."""
    draw = torch.Generator().manual_seed(0)
    rows = prompts * RESPONSES
    lengths = (
        (torch.randn(rows, generator=draw).mul(0.6).exp() * 0.33 * response_width)
        .clamp(1, response_width)
        .long()
    )
    response_mask = torch.arange(response_width)[None, :] < lengths[:, None]
    tensors = {
        "input_ids": torch.randint(0, 32_000, (rows, prompt_width + response_width), generator=draw),
        "attention_mask": torch.cat([torch.ones(rows, prompt_width, dtype=torch.bool), response_mask], dim=1),
        "response_mask": response_mask,
        "loss_mask": response_mask.clone(),
        "advantages": torch.randn(rows, response_width, generator=draw),
    }
    tensors["responses"] = tensors["input_ids"][:, prompt_width:].contiguous()
    uids = [f"uid-{row // RESPONSES}" for row in range(rows)]
    ids = tuple(range(prompt_width))
    requests = [
        Request(row, ids, row // RESPONSES, float(prompt_width + response_width)) for row in range(rows)
    ]
    return Work(requests, DataProto.from_dict(tensors, {"uid": uids}))


def run_step(groups: dict[str, TinyGroup], work: Work, step: int) -> None:
    """The calls of one GRPO step."""
    batch = work.batch.select()
    groups["rollout"].generate(work.requests, step)
    batch |= groups["actor"].log_probs(batch, "old_log_probs")
    batch |= groups["reference"].log_probs(batch, "ref_log_prob")
    groups["actor"].update(batch, step)


class Simulated:
    """A backend of any number of ranks without processes, which answer at once.

    What the driver of a cluster does itself happens here as there: it encodes what each rank is given, once
    for those that share it, and decodes what each returns. `seconds` says for how long; `worker_seconds` is
    what the answers took, which is not the driver's time.
    """

    in_process = False
    call_timeout = math.inf

    def __init__(self, mesh: MeshInfo) -> None:
        from hybridflow.controller.ray.transport import decode, encode

        self._encode = encode
        self._decode = decode
        self._mesh = mesh
        self._worker = TinyWorker()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.worker_seconds = 0.0
        self.seconds = {"encode": 0.0, "decode": 0.0}
        self.messages = self.sent = self.received = 0

    def driver_bytes(self) -> int:
        """Return 0: nothing leaves the process."""
        return 0

    def store(self, columns: DataProto) -> Part:
        """Return a shard in this process."""
        return in_memory(columns)

    def mesh(self, role: str) -> MeshInfo:
        return self._mesh

    def are_colocated(self, role: str, other: str) -> bool:
        return True

    def run(self, role: str, method: str, calls: Sequence[Call | None]) -> list[Any]:
        known: set[tuple[int, int]] = set()
        results = []
        for call in calls:
            if call is None:
                continue
            self.messages += 1
            if call.arguments_id not in known:
                known.add(call.arguments_id)
                began = time.process_time()
                packet = self._encode((call.args, call.kwargs))
                self.seconds["encode"] += time.process_time() - began
                self.sent += packet.nbytes
            if call.returns:
                began = time.process_time()
                answer = self._encode(getattr(self._worker, method)(*call.args, **call.kwargs))
                self.worker_seconds += time.process_time() - began
                began = time.process_time()
                results.append(self._decode(answer))
                self.seconds["decode"] += time.process_time() - began
                self.received += answer.nbytes
        return results

    def submit(
        self, role: str, method: str, calls: Sequence[Call | None], lane: Lane = "ordered"
    ) -> dict[int, Part]:
        parts: dict[int, Part] = {}
        for rank, call in enumerate(calls):
            if call is not None:
                parts[rank] = Part()
                parts[rank].set_result(next(iter(self.run(role, method, [call])), None))
        return parts

    def shutdown(self) -> None:
        """Do nothing."""
