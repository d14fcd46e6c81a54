"""Seconds of each phase of a step, from what it must compute, read and send.

    ModelShape, Rows, layout ──Costs──► generation · a pass over the rows · an update · moved weights

A phase takes the time of its slowest resource: FLOPs over peak × MFU, bytes over bandwidth, bytes over links.
What no such count explains is in `Efficiency`, the only fitted numbers: `benchmarks/plan_check.py` fits them
to published runs, and a test fits them again and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from hybridflow.distributed.layout import ParallelLayout
from hybridflow.planner.hardware import CPU, Cluster
from hybridflow.planner.lengths import Lengths
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
    links: float = 0.7
    """Part of the links' rate that collectives reach."""

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name):.3g}" for field in fields(self))


CPU_EFFICIENCY = Efficiency(
    mfu=1.0, sparse_mfu=0.5, decode_bandwidth=0.3, decode_layer=1.5e-3, update=0.0, pass_layer=4e-3, links=1.0
)
"""A guess for a process on a CPU, whose peak is itself measured; the first step of a run corrects it."""


@dataclass(frozen=True)
class Rows:
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

    @property
    def longest(self) -> float:
        """Tokens of the longest row."""
        return self.prompt + self.lengths.longest(self.count)


@dataclass(frozen=True)
class Training:
    """How a model passes over rows."""

    layout: ParallelLayout
    max_tokens: float = 16384
    """Tokens of a micro-batch on one data rank."""
    recomputes: bool = True
    """Activation checkpointing."""
    offloads: bool = False
    """Parameters and optimizer rest in the host's memory between phases."""
    lora: bool = False
    reshards: bool = True
    """Gather sharded parameters for each pass of a micro-batch; False: once for an optimizer step."""


@dataclass(frozen=True)
class Costs:
    """The times of phases on a cluster."""

    cluster: Cluster
    efficiency: Efficiency = Efficiency()
    itemsize: int = 2
    """Bytes of a number in computation."""

    @property
    def on_cpu(self) -> bool:
        """Whether the run computes on a CPU, in whose memory all is at hand."""
        return self.cluster.hardware.name == CPU

    def _slowest(self, *seconds: float) -> float:
        return max(seconds) if self.cluster.hardware.overlaps else sum(seconds)

    def computing(self, shape: ModelShape, tokens: float, square: float) -> float:
        """Return the seconds in which one device computes a forward pass over rows of so many tokens, and
        squared tokens, in all.
        """
        experts = 2.0 * shape.active_experts * tokens
        dense = 2.0 * (shape.active - shape.active_experts) * tokens + shape.causal_flops(tokens, square)
        return (
            dense / self.efficiency.mfu + experts / self.efficiency.sparse_mfu
        ) / self.cluster.hardware.peak

    def mfu(
        self, shape: ModelShape, rows: Rows, seconds: float, devices: int, *, lora: bool = False
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
        cache = rows * context * shape.kv_bytes(self.itemsize)
        sampling = rows * shape.vocab * SAMPLING_BYTES / hardware.bandwidth
        reading = (weights + cache) / tensor / hardware.bandwidth / self.efficiency.decode_bandwidth
        flops = rows * (2.0 * shape.active + shape.pair_flops(context))
        computing = flops / tensor / hardware.peak / self.efficiency.mfu
        layers = len(shape.layers)
        sent = 2 * layers * rows * shape.hidden * self.itemsize * 2 * (tensor - 1) / tensor
        talking = 2 * layers * self.cluster.latency(tensor) + sent / self.cluster.rate(tensor)
        launching = layers * self.efficiency.decode_layer
        return self._slowest(reading, computing) + sampling + launching + talking

    def generation(
        self,
        shape: ModelShape,
        rows: Rows,
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

    def forward(self, shape: ModelShape, rows: Rows, training: Training) -> float:
        """Return the seconds of a forward pass over all rows."""
        passing = self._passes(shape, rows.tokens, rows.square, training, 1.0, 1.0)
        return passing + self._host(shape, training, self.itemsize)

    def update(
        self, shape: ModelShape, rows: Rows, training: Training, optimizer_steps: int, epochs: int = 1
    ) -> float:
        """Return the seconds of `epochs` passes over the rows with gradients, and of the optimizer steps."""
        forwards = 3.0 if not training.lora else 2.0
        forwards += 1.0 if training.recomputes else 0.0
        parts = max(optimizer_steps / epochs, 1.0)
        share = 1 / parts
        one = self._passes(shape, rows.tokens * share, rows.square * share, training, forwards, 2.0)
        trained = 0.02 if training.lora else 1.0
        held = shape.parameters / training.layout.world_size * training.layout.dp_replicate * trained
        stepping = held * STEP_BYTES / self.cluster.hardware.bandwidth + self.efficiency.update
        return optimizer_steps * (one + stepping) + self._host(shape, training, STATE_BYTES)

    def _host(self, shape: ModelShape, training: Training, each: int) -> float:
        """Return the seconds in which what is offloaded comes to the device and goes back."""
        if not training.offloads:
            return 0.0
        layout = training.layout
        held = shape.parameters / layout.world_size * layout.dp_replicate * each
        return 2 * held / (self.cluster.hardware.host * self.efficiency.links)

    def _passes(
        self,
        shape: ModelShape,
        tokens: float,
        square: float,
        training: Training,
        forwards: float,
        gathers: float,
    ) -> float:
        """Return the seconds of passes that compute `forwards` times a forward pass, and gather sharded
        parameters `gathers` times.
        """
        layout = training.layout
        hardware = self.cluster.hardware
        layers = len(shape.layers) / layout.pp
        here = tokens / layout.data
        micros = max(1.0, math.ceil(here / (training.max_tokens * layout.cp)))
        computing = self.computing(shape, tokens, square) * forwards / layout.world_size
        dense, experts = self._stage_bytes(shape, layout)
        reading = micros * (dense + experts) * forwards / hardware.bandwidth
        sharing = self._sharing(dense, experts, training, micros, gathers)
        fixed = micros * layers * forwards * self.efficiency.pass_layer
        fixed += self._talking(shape, layout, here, micros, forwards)
        bubble = (micros + layout.pp - 1) / micros
        return (self._slowest(computing, reading, sharing) + fixed) * bubble

    def _sharing(
        self, dense: float, experts: float, training: Training, micros: float, gathers: float
    ) -> float:
        """Return the seconds in which ranks gather parameters of so many bytes, and sum their gradients."""
        layout = training.layout
        ranks = layout.dp_shard * layout.tp
        shared = 0.0
        if layout.dp_shard > 1:
            shared += dense
        if ranks > layout.ep:  # else each rank has a part of the experts to itself, and nothing is sent
            shared += experts
        learns = gathers > 1 and not training.lora
        summed = 4 / self.itemsize  # gradients are summed in float32
        sent = shared * (gathers if training.reshards else 1.0)
        if learns:
            sent += shared * summed
        if training.reshards:
            sent *= micros
        seconds = sent / self.cluster.rate(ranks)
        if learns and layout.dp_replicate > 1:  # copies sum their shards once for an optimizer step
            shard = dense / layout.dp_shard + experts * layout.ep / ranks
            seconds += 2 * shard * summed / self.cluster.rate(ranks * layout.dp_replicate)
        return seconds / self.efficiency.links

    def _stage_bytes(self, shape: ModelShape, layout: ParallelLayout) -> tuple[float, float]:
        """Return the bytes of the weights that one rank computes with in a pass: dense ones, and experts."""
        stage = self.itemsize / layout.pp
        dense = shape.parameters - shape.expert_parameters
        return dense / layout.tp * stage, shape.expert_parameters / layout.ep * stage

    def _talking(
        self, shape: ModelShape, layout: ParallelLayout, here: float, micros: float, forwards: float
    ) -> float:
        """Return the seconds in which ranks of a pass wait for activations of each other."""
        layers = len(shape.layers) / layout.pp
        bytes_of = here / layout.cp * shape.hidden * self.itemsize
        rate = self.efficiency.links
        seconds = 0.0
        if layout.tp > 1:
            sent = 2 * 2 * bytes_of * (layout.tp - 1) / layout.tp
            seconds += layers * forwards * sent / (self.cluster.rate(layout.tp) * rate)
            seconds += micros * layers * forwards * 2 * self.cluster.latency(layout.tp)
        if layout.cp > 1:
            seconds += layers * forwards * 4 * bytes_of / (self.cluster.rate(layout.cp) * rate)
        if layout.ep > 1:
            sent = 2 * bytes_of * shape.experts_per_token * (layout.ep - 1) / layout.ep / layout.tp
            seconds += layers * forwards * sent / (self.cluster.rate(layout.ep) * rate)
            seconds += micros * layers * forwards * 2 * self.cluster.latency(layout.ep)
        return seconds

    def sync(self, shape: ModelShape, trainers: int, tensor: int, *, apart: bool) -> float:
        """Return the seconds in which each rank of generation gets its slice of the weights of an update.

        `apart`: generation has devices of its own. One device that trains and generates moves nothing.
        """
        if trainers == 1 and not apart:
            return 0.0
        received = shape.parameters * self.itemsize / tensor
        group = self.cluster.devices if apart else trainers
        return received / (self.cluster.rate(group) * self.efficiency.links)

    def checkpoint(self, shape: ModelShape) -> float:
        """Return the seconds in which all nodes write a checkpoint of a model in training."""
        return shape.parameters * STATE_BYTES / (DISK * len(self.cluster.nodes))


FITTED = Efficiency(mfu=0.458, sparse_mfu=0.0528, decode_bandwidth=0.92, decode_layer=1.15e-4, update=3.26)
"""Fitted to rows 10, 11 (on-policy), 22 and 26 of `benchmarks/published_runs.yaml`."""
