"""The choice of the next tokens as a CUDA graph, behind the one of the decode step: recorded once for each
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

from hybridflow.distributed.facilities import Recorder
from hybridflow.rollout.native import sampling
from hybridflow.rollout.native.graphs import MOST_GRAPHS
from hybridflow.rollout.native.random_numbers import uniforms
from hybridflow.rollout.native.rows import FILLING, RowTable
from hybridflow.rollout.native.sampling import RowSettings, SamplingPlan, sample

logger = logging.getLogger(__name__)

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
        """Return whether the buffers have place for so many rows, and stops."""
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
