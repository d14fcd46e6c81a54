"""Pushes of weights between two processes on one CUDA device."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch

from hybridflow.distributed.shards import Box, bit_sum
from hybridflow.weight_sync.wire.receiver import Receiver
from hybridflow.weight_sync.wire.sender import push

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HERE = Receiver()


def engine_receives(receipt: dict[str, Any]) -> dict[str, Any]:
    """In the engine's process."""
    return HERE.receive(dict, receipt) | {"checksums": HERE.checksums}


def test_buckets_by_cuda_ipc_arrive_as_they_were_sent() -> None:
    """Each bucket takes long to copy, and is much larger than the frame that tells the reader of it."""
    weights = [(f"w{number}", torch.randn(64, 1 << 20, device="cuda")) for number in range(8)]
    sums = {name: int(bit_sum(tensor, Box.whole(tensor.shape))) for name, tensor in weights}
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as engine:
        answers = []

        def call(method: str, receipt: dict[str, Any]) -> list[Any]:
            answers.append(engine.submit(engine_receives, receipt).result(600))
            return answers[-1:]

        for version in (1, 2, 3):
            push(call, weights, version, workers=1, transport="cuda_ipc", timeout=600)
            assert answers[-1] == {"version": version, "checksums": sums}
