"""Messages between neighbouring stages: hidden states forward, their gradients backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from hybridflow.distributed.mesh import Column


class Receipt:
    """A tensor that another stage sends; `wait` returns it once it is here."""

    def __init__(self, tensor: Tensor, work: dist.Work) -> None:
        self._tensor = tensor
        self._work = work

    def wait(self) -> Tensor:
        """Wait for the message, on a GPU without making the host wait."""
        self._work.wait()
        return self._tensor


class Channels:
    """The messages of one rank to the stages before and behind it, and from them.

    The last stage is followed by the first, since parts may go round several times. Two ranks must send and
    receive in the same order in each direction. All ranks of `column` make it together.
    """

    def __init__(self, column: Column, device: torch.device) -> None:
        self._column = column
        self._device = device
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._open()

    def send(self, tensor: Tensor, tag: int, *, forward: bool) -> None:
        """Send a tensor to the next stage (`forward`) or to the one before, without waiting."""
        peer, group = self._peer(1 if forward else -1, forward)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, peer, group=group, tag=tag)
        assert work is not None, "this rank is of the column"
        self._sent = [(each, kept) for each, kept in self._sent if not each.is_completed()]
        self._sent.append((work, tensor))

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, tag: int, *, forward: bool) -> Receipt:
        """Begin to receive a tensor from the stage before (`forward`) or from the next one."""
        peer, group = self._peer(-1 if forward else 1, forward)
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        work = dist.irecv(tensor, peer, group=group, tag=tag)
        assert work is not None, "this rank is of the column"
        return Receipt(tensor, work)

    def finish(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _peer(self, step: int, forward: bool) -> tuple[int, dist.ProcessGroup]:
        ranks = self._column.ranks
        peer = ranks[(self._column.stage + step) % len(ranks)]
        if forward:
            return peer, self._column.forward
        return peer, self._column.backward

    def _open(self) -> None:
        """Send one number round in each direction, because NCCL connects a pair at its first message."""
        stage = self._column.stage
        first = {True: 0, False: len(self._column.ranks) - 1}
        for forward, start in first.items():
            number = torch.zeros(1, device=self._device)
            if stage == start:
                self.send(number, 0, forward=forward)
            self.receive((1,), number.dtype, 0, forward=forward).wait()
            if stage != start:
                self.send(number, 0, forward=forward)
            self.finish()
