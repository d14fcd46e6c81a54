"""The package TransferQueue as a store of row shards (`trainer.row_store=transferqueue`).

    Packet ──hold──► a storage unit of the queue, and StoredPacket, which travels in its place
    StoredPacket ──opened──► Packet, wherever it is read

Its backends move bytes in ways that Ray's object store does not have, for example RDMA between nodes
(MooncakeStore, Yuanrong). A cluster has at most one queue: the first run starts it, with its settings,
and others join it. Each run has its own partition there.
"""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import TensorDict

from hybridflow.controller.ray.transport import Packet, StoredPacket
from hybridflow.errors import WorkerError, WorkerLost

logger = logging.getLogger(__name__)

T = TypeVar("T")

BYTES = "bytes"
"""The field of the queue that has a packet: all its parts, one behind the other."""
SIMPLE = "SimpleStorage"
"""The backend that the package takes where the settings name none."""
CONTROLLER = {"name": "TransferQueueController", "namespace": "transfer_queue"}
"""Where the package looks for the queue of a cluster."""


class TransferQueue:
    """A run's partition of the queue, as one process sees it. Any thread may call it.

    The package gives a request 200 s by default (its TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT). Where one fails,
    WorkerLost is raised, because its processes are lost or cannot be reached.
    """

    def __init__(self, partition: str) -> None:
        """Join the queue of this process's cluster, which runs."""
        self.partition = partition
        self._begun = False
        self._dropped: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        transfer_queue.init()

    @classmethod
    def start(cls, settings: Mapping[str, Any], seconds: float) -> TransferQueue:
        """Start the queue of this cluster, or join it, for a new run; wait so long for its processes.

        Raises WorkerError where the queue does not start.
        """
        begun = not _runs()
        conf = OmegaConf.create(dict(settings))
        _within(seconds, lambda: transfer_queue.init(conf), cpus_of(settings))
        logger.info(
            "rows are in TransferQueue (%s), which this run has %s",
            settings.get("backend", {}).get("storage_backend", SIMPLE),
            "started" if begun else "joined, with the settings of the run that started it",
        )
        made = cls(f"hybridflow-{uuid.uuid4().hex}")
        made._begun = begun
        threading.Thread(target=made._drop, name="rows that are freed", daemon=True).start()
        return made

    def joining(self) -> Callable[[], TransferQueue]:
        """Return a function with which another process of the cluster joins it."""
        return partial(TransferQueue, self.partition)

    def hold(self, packet: Packet) -> StoredPacket:
        """Put a packet into the queue."""
        parts = [np.frombuffer(packet.pickled, dtype=np.uint8), *packet.buffers]
        held = StoredPacket(uuid.uuid4().hex, tuple(part.nbytes for part in parts))
        whole = torch.from_numpy(np.concatenate(parts))[None]
        fields = TensorDict({BYTES: whole}, batch_size=1)
        self._ask(
            lambda: transfer_queue.kv_batch_put([held.key], self.partition, fields), "does not take rows"
        )
        return held

    def opened(self, packet: Packet | StoredPacket) -> Packet:
        """Return the packet; one that is held is fetched."""
        if not isinstance(packet, StoredPacket):
            return packet
        found = self._ask(
            lambda: transfer_queue.kv_batch_get([packet.key], self.partition, [BYTES]), "has lost rows"
        )
        whole = found[BYTES][0].numpy()
        whole.flags.writeable = False
        pickled, *buffers = np.split(whole, np.cumsum(packet.sizes)[:-1])
        return Packet(pickled.tobytes(), tuple(buffers))

    def drop(self, held: StoredPacket) -> None:
        """Free a packet soon, which has no readers any more; for the process that has started this."""
        self._dropped.put(held.key)

    def close(self) -> None:
        """Free all rows of the run, and end the queue if this process has started it."""
        self._dropped.put(None)
        try:
            if self._begun:
                transfer_queue.close()
                return
            keys = list(transfer_queue.kv_list(self.partition).get(self.partition, {}))
            if keys:
                transfer_queue.kv_clear(keys, self.partition)
        except Exception as error:  # a queue that is gone holds no rows
            logger.warning("leaving TransferQueue: %s", error)

    def _ask(self, request: Callable[[], T], what: str) -> T:
        try:
            return request()
        except Exception as error:  # the package raises RuntimeError, ValueError and those of sockets
            raise WorkerLost(f"TransferQueue {what}: {error}") from error

    def _drop(self) -> None:
        while True:
            key = self._dropped.get()
            if key is None:
                return
            try:
                transfer_queue.kv_clear([key], self.partition)
            except Exception:  # a reader of a lost queue gets the error; one row too many there is harmless
                continue


def cpus_of(settings: Mapping[str, Any]) -> int:
    """Return the CPUs that Ray counts for the queue's own processes."""
    backend = settings.get("backend", {})
    if backend.get("storage_backend", SIMPLE) != SIMPLE:
        return 1
    return 1 + int(backend.get(SIMPLE, {}).get("num_data_storage_units", 2))


def _runs() -> bool:
    try:
        ray.get_actor(**CONTROLLER)
    except ValueError:
        return False
    return True


def _within(seconds: float, work: Callable[[], Any], cpus: int) -> None:
    """Do this in a thread, since the package waits for its processes without a timeout."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def working() -> None:
        try:
            work()
            done.set_result(None)
        except Exception as error:  # whatever the package raises is reported below
            done.set_exception(error)

    threading.Thread(target=working, name="TransferQueue starts", daemon=True).start()
    try:
        done.result(seconds)
    except concurrent.futures.TimeoutError as error:
        raise WorkerError(
            f"TransferQueue has not started within {seconds:.0f} s (trainer.startup_timeout): its processes "
            f"take {cpus} CPUs of the Ray cluster beside those of the run; are that many free?"
        ) from error
    except Exception as error:
        raise WorkerError(f"TransferQueue does not start with trainer.transfer_queue: {error}") from error
