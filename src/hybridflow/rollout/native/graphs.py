"""A decode step as a CUDA graph: recorded once for each bucket of rows, then replayed at once.

    tokens, lengths [B] ──copy──► buffers [R ≥ B] ──replay──► last hidden states [R, H] ──first B──► logits
                                                       ▲ slots or blocks, and weights: by their addresses

The weights are updated in place, so a graph sees what an optimizer step did. Where parameters or the cache
have moved, all graphs are dropped; their addresses are compared when a session begins, when the weights have
changed, and when the cache says that it has moved. A kernel that reads blocks also reads the lengths of the
rows, so that one graph serves rows of any length; slots need one for each bucket of keys too.

Rows of a bucket beyond the real ones write to the first position of a free row, or to the next one of a row
in chunked prefill; what comes to be there writes that position itself.

The choice of the next tokens is a CUDA graph too, behind the one of the decode step: recorded once for each
bucket of rows and each mixture of parameters, then replayed at once.

    columns of a RowTable ──copy, where rows have changed──► buffers [R ≥ B] ┐
    logits [B, V], tokens so far [B] ──copy──► buffers [R, V], [R] ──────────┴─replay──► facts [R, 3 or 4]

The output layer stays outside, because the bits of its products depend on the number of rows. A recording
changes nothing that lasts: the table notes the tokens that come out. A random number is a function of a row's
seed and of its number of tokens, so that no generator has a state. What few requests ask for (edited logits,
the most probable tokens, a sorted vocabulary) is done without.

Graphs hold memory of a few times the size of the logits. They are dropped when the engine sleeps; each takes
milliseconds to record.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridflow.distributed.accelerators import features
from hybridflow.distributed.facilities import Recorder, facilities
from hybridflow.models.cache.kv_cache import KVCache
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.rows import FILLING, RowTable
from hybridflow.rollout.native.sampling import RowSettings, SamplingPlan, sample, uniforms
from hybridflow.rollout.native.step import decode_rows

logger = logging.getLogger(__name__)
LEAST_KEYS = 128
MOST_GRAPHS = 64
"""Graphs that are kept; the least recently used one is dropped first."""
SETTINGS = ("stream", "temperature", "top_k", "top_p", "min_p", "greedy")
"""Columns that say the same of a row from its first token to its last, as `stops` does."""
RECORDED = (
    sampling.DRAWN
    | sampling.GREEDY
    | sampling.TEMPERATURE
    | sampling.MIN_P
    | sampling.LEADING
    | sampling.BEYOND
)
"""Needs that decide which operations a recording has."""
NOT_RECORDED = sampling.EDITS | sampling.TOP_LOG_PROBS | sampling.WHOLE
LEAST_STOPS = 8


class GraphDecoder:
    """`decode_rows` by CUDA graphs; where a step cannot be recorded, it warns once and goes on without."""

    def __init__(
        self, policy: PolicyModel, recorder: Recorder, sizes: Sequence[int], most: int = MOST_GRAPHS
    ) -> None:
        """`sizes`: numbers of rows that graphs are made for; more rows than the largest are decoded without.
        `most`: graphs to keep.
        """
        self.policy = policy
        self.sizes = sorted(set(sizes))
        self.most = most
        self.num_recorded = 0
        """Number of graphs that were recorded so far."""
        self.problem: str | None = None
        """Reason why graphs are not used any longer, or None."""
        self._recorder = recorder
        self._graphs: OrderedDict[tuple[int, int], Callable[[], Tensor]] = OrderedDict()
        self._place: int | None = None  # of the cache when addresses were compared
        self._addresses: list[int] = []
        self._tokens, self._lengths, self._shifts = torch.zeros(
            3, self.sizes[-1], dtype=torch.int64, device=policy.device
        ).unbind()

    @property
    def num_graphs(self) -> int:
        """Number of graphs that are kept now."""
        return len(self._graphs)

    def __call__(
        self, cache: KVCache, tokens: Tensor, lengths: Tensor, longest: int, shifts: Tensor | None = None
    ) -> Tensor:
        """Arguments and result of `decode_rows`; the result is overwritten by the next call.

        `lengths` may go on behind the rows that decode, with one whose prompt is in chunked prefill: what a
        graph writes there, its next chunk overwrites.
        """
        count = len(tokens)
        if count > self.sizes[-1] or self.problem is not None or self.policy.exact is not None:
            return decode_rows(self.policy, cache, tokens, lengths[:count], longest, shifts=shifts)
        self._drop_stale(cache)
        rows = min(next(size for size in self.sizes if size >= count), cache.num_slots)
        keys = cache.capacity
        if not cache.reads_lengths:
            keys = min(key_bucket(longest + 1), keys)
        used = min(len(lengths), rows)
        self._tokens[:count].copy_(tokens)
        self._lengths[:used].copy_(lengths[:used])
        if used < rows:
            self._lengths[used:rows] = 0
        kept_shifts = None
        if shifts is not None:
            kept_shifts = self._shifts[:rows]
            kept_shifts[:count].copy_(shifts)
            kept_shifts[count:] = 0
        replay = self._graphs.get((rows, keys))
        if replay is not None:
            self._graphs.move_to_end((rows, keys))
            return replay()[:count]

        def eager() -> Tensor:
            return decode_rows(self.policy, cache, tokens, lengths[:count], longest, shifts=shifts)

        def run() -> Tensor:
            own = (self._tokens[:rows], self._lengths[:rows])
            return decode_rows(self.policy, cache, *own, keys - 1, keys, kept_shifts)

        return self._record((rows, keys), run, eager)

    def recheck(self) -> None:
        """Check all addresses at the next step: parameters may have moved or been replaced."""
        self._place = None

    def drop(self) -> None:
        """Give up all graphs and their memory."""
        self._graphs.clear()
        self._addresses = []
        self._recorder.forget()

    def _record(
        self, bucket: tuple[int, int], run: Callable[[], Tensor], eager: Callable[[], Tensor]
    ) -> Tensor:
        """Record the graph of a bucket and compare it with its step; return that step's own states."""
        wanted = eager()  # also: whatever the first call of a model finds out, it finds out here
        try:
            replay = self._recorder.record(run)
            got = replay()[: len(wanted)]
        except Exception as error:  # whatever forbids a recording: the step is done without
            self._give_up(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return eager()  # once more: slots hold what was tried
        # whether states [B, H] are the same up to rounding, by row; rows that are not finite say nothing
        difference = (got.double() - wanted.double()).norm(dim=-1)
        bound = torch.finfo(wanted.dtype).eps ** 0.5 * wanted.double().norm(dim=-1)
        if not bool(((difference <= bound) | ~wanted.isfinite().all(-1)).all()):
            self._give_up(
                f"the graph of {bucket[0]} rows and {bucket[1]} keys gave other states than the step that "
                "it was recorded from"
            )
            return eager()
        self.num_recorded += 1
        self._graphs[bucket] = replay
        if len(self._graphs) > self.most:
            self._graphs.popitem(last=False)
        return wanted

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.drop()
        logger.warning(
            "generation goes on without CUDA graphs, a few times as slow for small models: %s. "
            "To leave them out from the start, set actor_rollout_ref.rollout.enforce_eager=true",
            problem,
        )

    def _drop_stale(self, cache: KVCache) -> None:
        """Graphs hold addresses: drop them where the cache or weights have others now."""
        if self._place == cache.place:
            return
        held = [*cache.tensors(), *self.policy.parameters(), *self.policy.buffers()]
        addresses = [cache.num_slots, cache.capacity, *(tensor.data_ptr() for tensor in held)]
        if addresses != self._addresses:
            if self._graphs:
                self.drop()
            self._addresses = addresses
        self._place = cache.place


def capture_sizes(most: int) -> list[int]:
    """Numbers of rows to make graphs for, up to `most`: 1, 2, 4, 8, 16, 24, then powers of two and 1.5 times
    them, and `most` itself.
    """
    sizes = [1, 2, 4, 8, 16, 24]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-2])
    return sorted({min(size, most) for size in sizes})


def key_bucket(keys: int) -> int:
    """The least of 128, 192, 256, 384, 512, … that is not below `keys`."""
    bucket = LEAST_KEYS
    while bucket < keys:
        if bucket + bucket // 2 >= keys:
            return bucket + bucket // 2
        bucket *= 2
    return bucket


def graph_decoder(
    policy: PolicyModel, *, max_rows: int, enforce_eager: bool | None, sizes: Sequence[int] | None, ranks: int
) -> GraphDecoder | None:
    """The decoder of an engine of at most `max_rows` rows; None where steps are not recorded.

    That is on devices that record none, where `enforce_eager` says so, and where `ranks` generate together:
    what one of them fails to record, the others would wait for.
    """
    if not features(policy.device.type).records_steps or enforce_eager:
        return None
    if ranks > 1:
        logger.info("generation by %d ranks together does without CUDA graphs", ranks)
        return None
    recorder = facilities(policy.device.type).recorder(policy.device)
    return GraphDecoder(policy, recorder, sizes or capture_sizes(max_rows))


class GraphSampler:
    """`sample` by CUDA graphs, for sessions that look ahead; where it cannot be recorded, it warns once."""

    def __init__(self, recorder: Recorder, sizes: Sequence[int]) -> None:
        """`sizes`: numbers of rows that graphs are made for; more rows are sampled without."""
        self.sizes = sorted(set(sizes))
        self.num_recorded = 0
        """Number of graphs that were recorded so far."""
        self.problem: str | None = None
        """Reason why graphs are not used any longer, or None."""
        self._recorder = recorder
        self._graphs: OrderedDict[tuple[int, int], Callable[[], Tensor]] = OrderedDict()
        self._compared: set[int] = set()  # mixtures of which a graph gave what its step gave
        self._buffers: dict[str, Tensor] = {}
        self._place: int | None = None  # of the table whose columns the buffers have

    def __call__(self, table: RowTable, logits: Tensor) -> Tensor | None:
        """Sample a token for each decoding row of a table, by logits [B, V].

        Returns `Sampled.facts`, which the next call overwrites, or None where they are to be sampled without.
        """
        count = len(logits)
        plan = table.plan
        if self.problem is not None or count > self.sizes[-1] or plan.any(NOT_RECORDED):
            return None
        rows = next(size for size in self.sizes if size >= count)
        self._fill(rows, table, logits)
        key = (rows, plan.asked & RECORDED)
        replay = self._graphs.get(key)
        if replay is not None:
            self._graphs.move_to_end(key)
            return replay()[:count]
        return self._record(key, count)

    def drop(self) -> None:
        """Give up all graphs and their memory."""
        self._graphs.clear()
        self._buffers = {}
        self._place = None
        self._recorder.forget()

    def _fill(self, rows: int, table: RowTable, logits: Tensor) -> None:
        """Copy what changes with each step, and the settings of all rows where these are other rows now."""
        width = table.stops.shape[1]
        if not self._fits(rows, width):
            self.drop()
            for name in (*SETTINGS, "generated"):
                self._buffers[name] = getattr(table, name).new_zeros(rows)
            self._buffers["stops"] = table.stops.new_zeros(rows, max(2 * width, LEAST_STOPS))
            self._buffers["logits"] = logits.new_zeros(rows, logits.shape[1])
        if self._place != table.place:
            most = len(self._buffers["stops"])  # a row in chunked prefill among them: it may decode next
            for name in SETTINGS:
                column = getattr(table, name)[: min(table.count, most)]
                self._buffers[name][: len(column)].copy_(column)
            stops = table.stops[: min(table.count, most)]
            self._buffers["stops"].fill_(FILLING["stops"])
            self._buffers["stops"][: len(stops), :width].copy_(stops)
            self._place = table.place
        count = len(logits)
        self._buffers["generated"][:count].copy_(table.generated[:count])
        self._buffers["logits"][:count].copy_(logits)

    def _fits(self, rows: int, width: int) -> bool:
        """Return whether the buffers have place for that many rows and stops."""
        if not self._buffers:
            return False
        most_rows, most_stops = self._buffers["stops"].shape
        return rows <= most_rows and width <= most_stops

    def _record(self, key: tuple[int, int], count: int) -> Tensor | None:
        """Record a graph; the first of each mixture is compared with what it was recorded from."""
        rows, needs = key
        own = {name: buffer[:rows] for name, buffer in self._buffers.items()}
        plan = SamplingPlan([needs] * rows)

        def run() -> Tensor:
            uniform = None
            if plan.any(sampling.DRAWN):
                uniform = uniforms(own["stream"], own["generated"], own["temperature"].dtype)
            limits = [own[name] for name in ("temperature", "top_k", "top_p", "min_p", "greedy")]
            return sample(own["logits"], plan, RowSettings(uniform, *limits), ahead=True).facts(own["stops"])

        try:
            replay = self._recorder.record(run)
            facts = replay()[:count]
            if needs not in self._compared and not _agree(facts, run()[:count]):
                raise RuntimeError("the graph chose other tokens than the step that it was recorded from")
        except Exception as error:  # whatever forbids a recording: the tokens are chosen without
            self.problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.drop()
            logger.warning(
                "tokens are chosen without CUDA graphs, by some forty operations a step: %s. "
                "To leave out all graphs, set actor_rollout_ref.rollout.enforce_eager=true",
                self.problem,
            )
            return None
        self.num_recorded += 1
        self._compared.add(needs)
        self._graphs[key] = replay
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return facts


def _agree(got: Tensor, wanted: Tensor) -> bool:
    """Whether facts [B, 3 or 4] have the same tokens, and log-probs up to rounding."""
    first, second = (facts[:, 1].view(torch.float64) for facts in (got, wanted))
    near = torch.isclose(first, second, atol=1e-3, equal_nan=True)
    return bool((near & (got[:, 0] == wanted[:, 0])).all())
