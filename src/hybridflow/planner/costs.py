"""Seconds of each phase of a step, from what it must compute, read and send.

    ModelShape, StepRows, layout ──Costs──► generation · a pass over the rows · an update · moved weights

A phase takes the time of its slowest resource: FLOPs over peak × MFU, bytes over bandwidth, bytes over links.
What no such count explains is in `Efficiency`, the only fitted numbers: `benchmarks/plan_check.py` fits them
to published runs, and a test fits them again and compares.

Responses have lengths: a mean, a limit and a tail between, or lengths that were seen.

Lengths ──segments──► how many of the rows still run, stretch by stretch of tokens

Decoding reads the weights once for a token of all rows that run, so the few long rows of a batch cost as much
time as all of them together; the tail is what a mean hides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from hybridflow.planner.hardware import Cluster, cpu_hardware
from hybridflow.planner.memory import RoleEngine
from hybridflow.planner.model_shape import ModelShape

STATE_BYTES = 16
"""Bytes of a trained parameter in a checkpoint and between steps: weights, masters and moments."""
STEP_BYTES = 100
"""Bytes that an optimizer step moves for each trained parameter: AdamW by separate operations on float32, the
norm of the gradient and its scaling.
"""
DISK = 2e9
"""Bytes a second that a node writes to its disk or to the network's."""
SAMPLING_BYTES = 32
"""Bytes that sampling moves for each row and token of the vocabulary: logits, probabilities, draw."""
SPREAD = 0.7
"""Standard deviation of the logarithm of a length where nothing else is known."""
_POINTS = [(index + 0.5) / 128 for index in range(128)]
_NORMAL = [NormalDist().inv_cdf(point) for point in _POINTS]


@dataclass(frozen=True)
class Efficiency:
    """The parts of a machine's peaks that programs reach, and the time that no peak explains."""

    mfu: float = 0.45
    """Part of the peak FLOPs in passes over packed rows: attention and dense matrices."""
    sparse_mfu: float = 0.12
    """The same of routed experts, whose matrix products are small and uneven."""
    decode_bandwidth: float = 0.6
    """Part of the memory bandwidth with which a decode step reads weights and cache."""
    decode_layer: float = 60e-6
    """Seconds of a layer in a decode step beside that: launches, scheduling, sampling."""
    update: float = 3.0
    """Seconds of an optimizer step that do not depend on its rows."""
    pass_layer: float = 2e-4
    """Seconds of a layer in a forward pass of a micro-batch that do not depend on its tokens."""
    outside: float = 0.0
    """What a micro-batch takes besides its layers and tokens, in layers: packing, embedding, head, loss."""
    links: float = 0.7
    """Part of the links' rate that collectives reach."""

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name):.3g}" for field in fields(self))


CPU_EFFICIENCY = Efficiency(
    mfu=1.0, sparse_mfu=0.5, decode_bandwidth=0.3, decode_layer=1.5e-3, update=0.0, outside=1.0, links=1.0
)
"""A guess for a process on a CPU, whose peak is itself measured; the first step of a run corrects it.
`cpu_costs` adds the seconds of a layer, which are measured too.
"""
LAYER_OPERATIONS = 135
"""Small operations that take as long as a layer of a forward pass besides its tokens. An update of a model of
two layers took 1,150 to 1,210 of them for a pass with its backward, and with what is outside of the layers.
"""


@dataclass(frozen=True)
class StepRows:
    """The rows of a step."""

    count: float
    prompt: float
    """Mean tokens of a prompt."""
    lengths: Lengths
    group: int = 1
    """Responses to a prompt, which share its prefill."""

    @property
    def tokens(self) -> float:
        """Tokens of prompts and responses."""
        return self.count * (self.prompt + self.lengths.mean)

    @property
    def square(self) -> float:
        """Sum of the squared lengths of the rows."""
        mean = self.lengths.mean
        return self.count * (self.prompt**2 + 2 * self.prompt * mean + self.lengths.square)


@dataclass(frozen=True)
class Costs:
    """The times of phases on a cluster."""

    cluster: Cluster
    efficiency: Efficiency = Efficiency()
    itemsize: int = 2
    """Bytes of a number in computation."""

    @property
    def of_tokens_alone(self) -> Costs:
        """The costs of a machine on which a pass takes nothing besides its tokens and weights."""
        return replace(self, efficiency=replace(self.efficiency, pass_layer=0.0))

    def computing(self, shape: ModelShape, tokens: float, square: float) -> float:
        """Return the seconds in which one device computes a forward pass over rows with these sums of
        tokens and of squared tokens.
        """
        experts = 2.0 * shape.active_experts * tokens
        dense = 2.0 * (shape.active - shape.active_experts) * tokens + shape.causal_flops(tokens, square)
        return (
            dense / self.efficiency.mfu + experts / self.efficiency.sparse_mfu
        ) / self.cluster.hardware.peak

    def mfu(
        self, shape: ModelShape, rows: StepRows, seconds: float, devices: int, *, lora: bool = False
    ) -> float:
        """Return the part of the devices' peak that passes over the rows with gradients have used.

        What is computed a second time for want of memory does not count.
        """
        once = 2.0 * shape.active * rows.tokens + shape.causal_flops(rows.tokens, rows.square)
        passes = 2.0 if lora else 3.0
        return passes * once / seconds / devices / self.cluster.hardware.peak

    def decode_step(self, shape: ModelShape, rows: float, context: float, tensor: int) -> float:
        """Return the seconds of one token for each of `rows` rows with `context` tokens before it, on
        `tensor` devices.
        """
        hardware = self.cluster.hardware
        experts = shape.expert_parameters
        if shape.experts:
            experts *= 1 - (1 - shape.experts_per_token / shape.experts) ** rows
        table = 0 if shape.tied else shape.vocab * shape.hidden  # embeddings are looked up, not read
        weights = (shape.parameters - shape.expert_parameters - table + experts) * self.itemsize
        cache = rows * context * (self.itemsize * shape.kv_numbers)
        sampling = rows * shape.vocab * SAMPLING_BYTES / hardware.bandwidth
        reading = (weights + cache) / tensor / hardware.bandwidth / self.efficiency.decode_bandwidth
        flops = rows * (2.0 * shape.active + shape.pair_flops(context))
        computing = flops / tensor / hardware.peak / self.efficiency.mfu
        layers = len(shape.layers)
        talking = 0.0
        if tensor > 1:
            sent = 2 * layers * rows * shape.hidden * self.itemsize * 2 * (tensor - 1) / tensor
            talking = 2 * layers * self.cluster.latency(tensor) + sent / self.cluster.rate(tensor)
        launching = layers * self.efficiency.decode_layer
        slowest = max if hardware.overlaps else sum
        return slowest((reading, computing)) + sampling + launching + talking

    def generation(
        self,
        shape: ModelShape,
        rows: StepRows,
        devices: int,
        tensor: int,
        most_rows: float = math.inf,
        *,
        refilled: bool = False,
    ) -> float:
        """Return the seconds until all rows are generated by replicas of `tensor` devices each, of which one
        runs at most `most_rows` rows. `refilled`: rows of the next batch take the places of those that end,
        so that no step waits for the longest row.
        """
        replicas = max(devices // tensor, 1)
        here = max(rows.count / replicas, 1.0)
        running = max(1.0, min(here, most_rows))
        prompts = here / rows.group * rows.prompt
        seconds = self.computing(shape, prompts, prompts * rows.prompt) / tensor
        middle = rows.prompt + rows.lengths.square / (2 * rows.lengths.mean)
        if refilled:
            full = here * rows.lengths.mean / running
            return seconds + full * self.decode_step(shape, running, middle, tensor)
        full = (here - running) * rows.lengths.mean / running
        seconds += full * self.decode_step(shape, running, middle, tensor)
        for begins, ends, left in rows.lengths.segments(running):
            context = rows.prompt + (begins + ends) / 2
            seconds += (ends - begins) * self.decode_step(shape, left, context, tensor)
        return seconds

    def passes(self, shape: ModelShape, rows: StepRows, engine: RoleEngine, *, learns: bool) -> float:
        """Return the seconds of a forward pass over all rows; with `learns` those of the engine's passes with
        gradients, and of its optimizer steps.
        """
        layout = engine.layout
        hardware = self.cluster.hardware
        links = self.efficiency.links
        adapters = engine.trains_adapters
        share = forwards = gathers = 1.0  # of the rows at once; of a forward pass; of sharded parameters
        if learns:
            share = 1 / max(engine.optimizer_steps / engine.epochs, 1.0)
            forwards = 2.0 if adapters else 3.0
            forwards += 1.0 if engine.model.enable_gradient_checkpointing else 0.0
            gathers = 2.0
        layers = len(shape.layers) / layout.pp
        tokens = rows.tokens * share
        here = tokens / layout.data
        micros = max(1.0, math.ceil(here / (engine.max_tokens * layout.cp)))
        if engine.max_rows is not None:
            micros = max(micros, math.ceil(rows.count * share / layout.data / engine.max_rows))
        computing = self.computing(shape, tokens, rows.square * share) * forwards / layout.world_size

        # bytes of the weights that one rank computes with
        stage = self.itemsize / layout.pp
        dense = (shape.parameters - shape.expert_parameters) / layout.tp * stage
        experts = shape.expert_parameters / layout.ep * stage
        reading = micros * (dense + experts) * forwards / hardware.bandwidth

        # ranks gather parameters, and sum their gradients in float32
        ranks = layout.dp_shard * layout.tp
        sums = learns and not adapters
        summed = 4 / self.itemsize
        sharing = 0.0
        if ranks > 1:
            shared = dense if layout.dp_shard > 1 else 0.0
            if ranks > layout.ep:  # else each rank has a part of the experts to itself, and nothing is sent
                shared += experts
            reshards = engine.fsdp.reshard_after_forward
            sent = shared * (gathers if reshards else 1.0)
            if sums:
                sent += shared * summed
            if reshards:
                sent *= micros
            sharing = sent / self.cluster.rate(ranks)
        if sums and layout.dp_replicate > 1:  # copies sum their shards once for an optimizer step
            shard = dense / layout.dp_shard + experts * layout.ep / ranks
            sharing += 2 * shard * summed / self.cluster.rate(ranks * layout.dp_replicate)
        sharing /= links

        # ranks wait for activations of each other
        activations = here / layout.cp * shape.hidden * self.itemsize
        talking = 0.0
        if layout.tp > 1:
            sent = 2 * 2 * activations * (layout.tp - 1) / layout.tp
            talking += layers * forwards * sent / (self.cluster.rate(layout.tp) * links)
            talking += micros * layers * forwards * 2 * self.cluster.latency(layout.tp)
        if layout.cp > 1:
            talking += layers * forwards * 4 * activations / (self.cluster.rate(layout.cp) * links)
        if layout.ep > 1:
            sent = 2 * activations * shape.experts_per_token * (layout.ep - 1) / layout.ep / layout.tp
            talking += layers * forwards * sent / (self.cluster.rate(layout.ep) * links)
            talking += micros * layers * forwards * 2 * self.cluster.latency(layout.ep)

        in_layers = layers + self.efficiency.outside
        fixed = micros * in_layers * forwards * self.efficiency.pass_layer + talking
        bubble = (micros + layout.pp - 1) / micros
        slowest = max if hardware.overlaps else sum
        seconds = (slowest((computing, reading, sharing)) + fixed) * bubble

        held = shape.parameters / layout.world_size * layout.dp_replicate
        fetching = 0.0
        if engine.fsdp.param_offload or engine.fsdp.offload_policy:  # there and back
            each = STATE_BYTES if learns else self.itemsize
            fetching = 2 * (held * each) / (hardware.host * links)
        if not learns:
            return seconds + fetching
        trained = 0.02 if adapters else 1.0
        stepping = held * trained * STEP_BYTES / hardware.bandwidth + self.efficiency.update
        return engine.optimizer_steps * (seconds + stepping) + fetching

    def sync(self, shape: ModelShape, trainers: int, tensor: int, *, apart: bool) -> float:
        """Return the seconds in which each rank of generation gets its slice of the weights of an update.

        `apart`: generation has its own devices. One device that trains and generates moves nothing.
        """
        if trainers == 1 and not apart:
            return 0.0
        received = shape.parameters * self.itemsize / tensor
        group = self.cluster.devices if apart else trainers
        return received / (self.cluster.rate(group) * self.efficiency.links)

    def checkpoint(self, shape: ModelShape) -> float:
        """Return the seconds in which all nodes write a checkpoint of a model in training."""
        return shape.parameters * STATE_BYTES / (DISK * len(self.cluster.nodes))


def cpu_costs(devices: int, peak: float, bandwidth: float, memory: float, operation: float) -> Costs:
    """Return the costs on processes of a CPU with these figures, as `distributed/device.py` measures them."""
    hardware = cpu_hardware(peak, bandwidth, memory)
    efficiency = replace(CPU_EFFICIENCY, pass_layer=LAYER_OPERATIONS * operation)
    return Costs(Cluster(hardware, devices), efficiency, itemsize=4)


FITTED = Efficiency(mfu=0.458, sparse_mfu=0.0528, decode_bandwidth=0.92, decode_layer=1.15e-4, update=3.26)
"""Fitted to rows 10, 11 (on-policy), 22 and 26 of `benchmarks/published_runs.yaml`."""


class DecodeStretch(NamedTuple):
    """A stretch of decode steps in which about as many rows run."""

    begins: float
    """Tokens of a response at its begin."""
    ends: float
    rows: float


@dataclass(frozen=True)
class Lengths:
    """Lengths of responses in tokens: log-normal with this mean, cut at the limit."""

    mean: float
    limit: float
    spread: float = SPREAD
    seen: tuple[float, ...] = ()
    """Lengths that were seen, in ascending order; they take the place of the distribution."""

    @classmethod
    def of(cls, lengths: Sequence[float]) -> Lengths:
        """Return the lengths of a batch that is there."""
        ordered = tuple(sorted(lengths))
        return cls(sum(ordered) / len(ordered), ordered[-1], seen=ordered)

    @cached_property
    def _middle(self) -> float:
        """The mean of the logarithm with which the cut distribution has the wanted mean, by bisection."""
        low = math.log(max(self.mean, 1.0)) - self.spread**2 - 1.0
        high = math.log(self.limit) + 8 * self.spread + 1.0
        for _ in range(50):
            middle = (low + high) / 2
            cut = (min(self.limit, math.exp(middle + self.spread * point)) for point in _NORMAL)
            if sum(cut) / len(_NORMAL) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def quantile(self, part: float) -> float:
        """Return the length that this part of the rows does not pass."""
        if self.seen:
            return self.seen[min(int(part * len(self.seen)), len(self.seen) - 1)]
        if self.mean >= self.limit or self.spread == 0:
            return min(self.mean, self.limit)
        inner = min(max(part, 1e-9), 1 - 1e-9)
        return min(self.limit, math.exp(self._middle + self.spread * NormalDist().inv_cdf(inner)))

    @cached_property
    def square(self) -> float:
        """The mean square of a length."""
        points = self.seen or tuple(self.quantile(point) for point in _POINTS)
        total = 0.0
        for point in points:
            total += point * point
        return total / len(points)

    def segments(self, rows: float) -> Iterator[DecodeStretch]:
        """Yield stretches in which the `rows` rows that begin together run, by about a fifth fewer each."""
        begins = 0.0
        running = float(rows)
        while running >= 1:
            after = running * 0.8 if running > 1.5 else 0.0
            ends = self.quantile(1 - max(after, 0.5) / rows)
            if ends > begins:
                yield DecodeStretch(begins, ends, (running + after) / 2 if after else running)
                begins = ends
            running = after
