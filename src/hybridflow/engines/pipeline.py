"""The engine of a model in stages: FSDP2 within a stage, messages between them, one step for all.

    micro-batches ──schedule──► passes of this rank's parts ──► states to the next stage, gradients back
    last stage: answers ──loss──► gradients      ends: gradients of tied embeddings are summed

Every stage has the same rows and therefore knows the sizes of all messages. Micro-batches keep their own
lengths: nothing is padded, and each is computed as on one rank. `Channels` passes messages between stages:
hidden states forward, their gradients backward.

The passes of a stage have an order: one forward, one backward (1F1B, arXiv:2104.04473).

    stage 0   F0 F1 F2    B0 F3 B1 F4 B2 …       a stage holds the activations of few micro-batches, and
    stage 1      F0 F1 B0 F2 B1 F3 B2 …          waits only at the beginning and at the end
    stage 2         F0 B0 F1 B1 F2 B2 …

With several parts on a stage (interleaved), micro-batches go round the stages as often, in groups as large
as there are stages, and the waits become shorter. The orders are found by playing the passes through, so an
order that waits for itself cannot come out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from hybridflow.distributed.mesh import Column, EngineMesh
from hybridflow.distributed.shards import local
from hybridflow.engines.base import BatchLimits, LossFn
from hybridflow.engines.expert_load import ExpertLoad
from hybridflow.engines.fsdp.engine import FSDPEngine
from hybridflow.engines.fsdp.sharding import choose_reduction, reshard, sharded_modules
from hybridflow.engines.micro_batch_engine import Accumulated
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.models.experts.routing import LIVE
from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.models.parallel.stages import Part, Stage
from hybridflow.observability.progress import progress
from hybridflow.protocol import DataProto


class Pass(NamedTuple):
    """A micro-batch's pass through one part of the model, forward or backward."""

    forward: bool
    part: int
    """Number of the part among all parts of the model; part p is on stage p modulo their number."""
    micro: int


@lru_cache(maxsize=64)
def one_forward_one_backward(stages: int, parts: int, micros: int) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes of each stage, in its order, of `micros` micro-batches in `parts` parts.

    Each stage takes forward passes in the order of `forwards`, and backward passes with the parts reversed,
    so messages between two stages in one direction are sent and awaited in the same order.
    """
    assert parts % stages == 0 and micros >= 1, f"{parts} parts, {stages} stages, {micros} micro-batches"
    ahead = [forwards(stages, parts, micros, stage) for stage in range(stages)]
    behind = [[Pass(False, parts - 1 - p, m) for _, p, m in ahead[stages - 1 - s]] for s in range(stages)]
    # activations that a stage may hold: as many as keep it busy until the first gradient comes back
    limits = [stages - stage for stage in range(stages)]
    if parts > stages:
        limits = [2 * (stages - stage) - 1 + parts - stages for stage in range(stages)]
    orders: list[list[Pass]] = [[] for _ in range(stages)]
    done: set[Pass] = set()
    held = [0] * stages
    while any(behind):
        chosen = [
            _next(ahead[s], behind[s], done, parts, may_hold=held[s] < limits[s]) for s in range(stages)
        ]
        if not any(chosen):  # a limit was too small for a last, smaller group
            chosen = [_next(ahead[s], behind[s], done, parts, may_hold=True) for s in range(stages)]
        assert any(chosen), "each pass waits for another"
        for stage, each in enumerate(chosen):
            if each is None:
                continue
            queue = behind
            if each.forward:
                queue = ahead
            queue[stage].pop(0)
            orders[stage].append(each)
            held[stage] += 2 * each.forward - 1
        done.update(each for each in chosen if each is not None)
    return tuple(tuple(order) for order in orders)


def forwards(stages: int, parts: int, micros: int, stage: int) -> list[Pass]:
    """Return the forward passes of a stage in order; a pass without gradients takes these alone."""
    own = range(stage, parts, stages)
    size = stages
    if len(own) == 1:
        size = micros
    return [
        Pass(True, part, micro)
        for first in range(0, micros, size)
        for part in own
        for micro in range(first, min(first + size, micros))
    ]


def _next(
    ahead: list[Pass], behind: list[Pass], done: set[Pass], parts: int, *, may_hold: bool
) -> Pass | None:
    """Return the pass that a stage takes now, or None if it waits; gradients come before further passes."""
    if behind:
        _, part, micro = behind[0]
        after = Pass(False, part + 1, micro)
        if part == parts - 1:
            after = Pass(True, part, micro)
        if after in done and Pass(True, part, micro) in done:
            return behind[0]
    if ahead and may_hold:
        _, part, micro = ahead[0]
        if part == 0 or Pass(True, part - 1, micro) in done:
            return ahead[0]
    return None


class PipelineEngine(FSDPEngine):
    """A `TrainEngine` over the parts of a model that this rank holds, `stage`, already sharded over `mesh`.

    `forward` returns zeros where the last stage is elsewhere: dispatch takes the answers from that one. The
    other arguments are those of `FSDPEngine`.
    """

    def __init__(self, stage: Stage, *, mesh: EngineMesh, **settings: Any) -> None:
        super().__init__(stage.model, root=stage, mesh=mesh, **settings)
        assert mesh.column is not None, "a model in stages is spread over several ranks"
        self.stage = stage
        self.column = mesh.column
        self.channels = Channels(mesh.column, self.device)
        self.tied_name: str | None = None
        if stage.tied and self.optimizer is not None:
            named = self.optimizer.parameters.items()
            self.tied_name = next((name for name, p in named if p is stage.model.head.weight), None)
        if self.tied_name is not None and self.column.stage > 0:
            self.counted_elsewhere = frozenset({self.tied_name})

    def _plan(self, rows: DataProto, limits: BatchLimits, *, at_least: int = 0) -> list[MicroBatch]:
        """Return at least one micro-batch for each stage: with fewer, some stages only wait."""
        return super()._plan(rows, limits, at_least=max(at_least, len(self.column.ranks)))

    def _forward_all(
        self, micros: Sequence[MicroBatch], spec: OutputSpec
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        number = len(self.stage.parts)
        order = forwards(len(self.column.ranks), number, len(micros), self.column.stage)
        run = _Run(self, micros, spec)
        for each in run.through(order):
            if self.stage.parts[each.part].is_last and not spec.routes:
                yield micros[each.micro], run.answers.pop(each.micro)
        self._end()
        if spec.routes or not self.stage.own[-1].is_last:
            for number, micro in enumerate(micros):
                yield micro, self._late_outputs(run, number, spec)

    def _late_outputs(self, run: _Run, number: int, spec: OutputSpec) -> Outputs:
        """Return a micro-batch's answers, zeros but on the last stage, and its routes in all layers."""
        packed = run.micros[number].packed
        names = [each.name for each in fields(spec) if getattr(spec, each.name) is True]
        empty = {
            name: torch.zeros(len(packed.targets), device=self.device) for name in names if name != "routes"
        }
        answers = run.answers.pop(number, empty)
        if spec.routes:
            routes = run.routes.pop(number)
            dist.all_reduce(routes, dist.ReduceOp.MAX, group=self.column.forward)
            answers["routes"] = self.policy.routes_of(packed, routes)
        return answers

    def _accumulate(
        self, micros: Sequence[MicroBatch], spec: OutputSpec, loss: LossFn, sums: Accumulated
    ) -> None:
        orders = one_forward_one_backward(len(self.column.ranks), len(self.stage.parts), len(micros))
        load = ExpertLoad.of(self.module, micros, self.mesh)
        run = _Run(self, micros, spec, loss, sums, load)
        for _ in run.through(orders[self.column.stage]):
            pass
        self._end()
        if load is not None:
            load.add_to(sums.metrics, self.name)
        if self.tied_name is not None:
            # sum the gradients of tied embeddings, of which the first and the last stage have one each
            assert self.optimizer is not None
            parameter = self.optimizer.parameters[self.tied_name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(local(parameter.grad), group=self.column.ends)

    def _end(self) -> None:
        self.channels.finish()
        reshard(self.stage)

    def before_backward(self, part: Part, *, last: bool) -> None:
        """Choose which gradients a part's backward pass reduces over the ranks of the stage."""
        modules = [each for block in self.stage.layers_of(part) for each in sharded_modules(block)]
        if part.is_first or part.is_last:
            ends = (self.stage, self.stage.model.head)
            modules += [each for each in ends if isinstance(each, FSDPModule)]
        choose_reduction(modules, last=last, keep_gathered=not self.fsdp.reshard_after_forward, recurse=False)


class _Run:
    """One pass of all micro-batches through the parts of a rank."""

    def __init__(
        self,
        engine: PipelineEngine,
        micros: Sequence[MicroBatch],
        spec: OutputSpec,
        loss: LossFn | None = None,
        sums: Accumulated | None = None,
        load: ExpertLoad | None = None,
    ) -> None:
        self.engine = engine
        self.micros = [micro.on(engine.device) for micro in micros]
        self.spec = spec
        self.loss = loss
        self.sums = sums
        self.load = load
        self.answers: dict[int, Outputs] = {}
        """Answers of the last part, by number of the micro-batch; without a loss."""
        self.routes: dict[int, Tensor] = {}
        """Experts [n, L, K] int32 by number of the micro-batch, where asked for; -1 in layers elsewhere."""
        self._kept: dict[tuple[int, int], tuple[Tensor | None, Tensor, Tensor | None]] = {}
        """(input, output, share of the auxiliary loss) of the forward passes whose backward pass is to come,
        by part and micro-batch.
        """
        self._receipts: dict[Pass, Receipt | None] = {}

    def through(self, order: Sequence[Pass]) -> Iterator[Pass]:
        """Take the passes in their order, and yield each when it is done.

        A pass's message is awaited in the background while the pass before it computes.
        """
        if self.loss is not None:
            for part in self.engine.stage.own:
                self.engine.before_backward(part, last=len(self.micros) == 1)
        for number, each in enumerate(progress.each(order, "pass", len(order))):
            for coming in order[number : number + 2]:
                if coming not in self._receipts:
                    self._receipts[coming] = self._receive(coming)
            receipt = self._receipts.pop(each)
            arrived = receipt.wait() if receipt is not None else None
            part = self.engine.stage.parts[each.part]
            if each.forward:
                self._forward(part, each.micro, arrived)
            else:
                self._backward(part, each.micro, arrived)
            yield each

    def _receive(self, each: Pass) -> Receipt | None:
        """Start to receive the input of a pass from another stage; None where it needs nothing."""
        stage = self.engine.stage
        part = stage.parts[each.part]
        if (each.forward and part.is_first) or (not each.forward and part.is_last):
            return None
        shape = (1, stage.num_states(self.micros[each.micro].packed), stage.width)
        return self.engine.channels.receive(
            shape, stage.dtype, self._tag(each.part, each.micro), forward=each.forward
        )

    def _forward(self, part: Part, number: int, arrived: Tensor | None) -> None:
        micro = self.micros[number]
        if arrived is not None and self.loss is not None:
            arrived.requires_grad_()
        if self.loss is not None and self.engine.dropout is not None:
            self.engine.choose_dropout(micro.packed)
        with self.engine.activations_kept():
            out = self.engine.stage(micro.packed, self.spec, part, arrived)
        if self.spec.routes:
            policy = self.engine.policy
            assert policy.routing is not None and policy.tape is not None, (
                "`follow_routes` comes before a pass"
            )
            size = (policy.tape.num_tokens, policy.routing.num_layers, policy.routing.top_k)
            routes = self.routes.setdefault(
                number, torch.full(size, LIVE, dtype=torch.int32, device=self.engine.device)
            )
            for layer, chosen in policy.tape.chosen.items():
                routes[:, layer] = chosen
        if part.is_last:
            if self.loss is None:
                self.answers[number] = out
                return
            assert self.sums is not None
            out = self.sums.share(micro, out, self.loss)
        else:
            assert out.dtype == self.engine.stage.dtype, (
                f"states between stages are {out.dtype}, not {self.engine.stage.dtype}"
            )
            self.engine.channels.send(out.detach(), self._tag(part.number + 1, number), forward=True)
        if self.loss is not None:
            balance = None
            if self.load is not None:
                balance = self.load.add(counts=micro.rows is not None, tells=part.is_last)
            self._kept[part.number, number] = (arrived, out, balance)

    def _backward(self, part: Part, number: int, gradient: Tensor | None) -> None:
        arrived, out, balance = self._kept.pop((part.number, number))
        if number == len(self.micros) - 1:
            self.engine.before_backward(part, last=True)
        gradients = {out: gradient}
        if balance is not None:
            gradients[balance] = None
        if self.engine.dropout is not None:  # of layers that are computed again
            self.engine.choose_dropout(self.micros[number].packed)
        roots = [root for root in gradients if root.requires_grad]  # nothing may be trained up to here
        if roots:
            torch.autograd.backward(roots, [gradients[root] for root in roots])
        if arrived is not None:
            if arrived.grad is None:
                assert self.sums is not None, "only training goes backward"
                self.sums.num_lost += 1
                arrived.grad = torch.zeros_like(arrived)
            self.engine.channels.send(arrived.grad, self._tag(part.number - 1, number), forward=False)

    def _tag(self, part: int, micro: int) -> int:
        """Return the number of the message to a part, about a micro-batch."""
        return micro * len(self.engine.stage.parts) + part


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
