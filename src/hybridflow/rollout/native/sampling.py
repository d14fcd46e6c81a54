"""Sampling of all rows at once, each with its own parameters; what no row asks for costs nothing. Each
choice is decided by a random number of its (seed, place in the response), the same in any batch.

    logits [B, V] ──/ temperature──► exponentials ──► log-prob of the token, as training computes it
        │                            (off the CPU: one softmax in their place)
        └──logit_bias, repetition_penalty, min_tokens──► exponentials ──min_p, top_k, top_p──► weights ──┐
    (seed, position) ──uniforms──► u [B] ──► first token whose running sum passes u × the whole sum ◄────┘

Nothing that changes which token is chosen enters its log-prob: training knows the temperature alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridflow.distributed.transfers import to_device
from hybridflow.rollout.base import SamplingParams

CHUNK_BYTES = 4 * 2**20
"""On CPU, rows whose logits take about this much are sampled together: the passes over them then stay in the
cache.
"""
ONE_LEVEL = 1024
"""Vocabularies up to this size have one running sum; larger ones have one over blocks and one inside of the
block that is hit.
"""
BLOCK = 64
MOST_BIAS = 1e9
"""Largest logit bias: the logits stay finite with it at every temperature that is allowed."""
LEADERS = 64
"""Top-k and top-p look at this many of the most probable tokens before they sort a large vocabulary."""
MANY_LEADERS = 1024
"""The number of leaders where the host does not wait: a row for which they are too few loses two steps."""

# what a row may ask for
DRAWN, GREEDY, TEMPERATURE, MIN_P, LEADING, LOGIT_BIAS, REPETITION, MIN_TOKENS, STOP_TEXTS, TOP_LOG_PROBS = (
    1 << bit for bit in range(10)
)
# top-p alone, or a top-k beyond LEADERS: the leaders may not suffice
BEYOND = 1 << 10
# a top-k beyond MANY_LEADERS, or a row that fell short: the whole vocabulary is sorted without asking
WHOLE = 1 << 11
EDITS = LOGIT_BIAS | REPETITION | MIN_TOKENS


def needs_of(params: SamplingParams) -> int:
    """Return the needs of a request, as a sum of the bits above."""
    leading = not params.takes_argmax and (params.top_k > 0 or params.top_p < 1)
    asked = {
        DRAWN: not params.takes_argmax,
        GREEDY: params.takes_argmax,
        TEMPERATURE: not params.takes_argmax and params.temperature != 1.0,
        MIN_P: not params.takes_argmax and params.min_p > 0,
        LEADING: leading,
        BEYOND: leading and not 0 < params.top_k <= LEADERS,
        WHOLE: leading and params.top_k > MANY_LEADERS,
        LOGIT_BIAS: bool(params.logit_bias),
        REPETITION: params.repetition_penalty != 1.0,
        MIN_TOKENS: params.min_tokens > 0,
        STOP_TEXTS: bool(params.stop),
        TOP_LOG_PROBS: params.top_log_probs > 0,
    }
    return sum(need for need, is_asked in asked.items() if is_asked)


def sampling_problem(
    params: SamplingParams, *, vocabulary: int, end_tokens: Iterable[int], can_decode: bool
) -> str | None:
    """Return the reason why the engine cannot sample so, with this vocabulary and `end_tokens`, or None."""
    for token, bias in params.logit_bias:
        if not 0 <= token < vocabulary:
            return f"logit_bias holds token id {token}, and the model's vocabulary is 0..{vocabulary - 1}"
        if not (bias == -float("inf") or abs(bias) <= MOST_BIAS):
            return (
                f"logit_bias of token {token} is {bias}: use a number from -{MOST_BIAS:g} to {MOST_BIAS:g}, "
                "or -inf to forbid the token"
            )
    forbidden = {token for token, bias in params.logit_bias if bias == -float("inf")}
    if params.min_tokens:
        forbidden |= set(end_tokens)
    if len(forbidden) >= vocabulary:
        return "logit_bias and min_tokens forbid every token of the vocabulary: allow at least one"
    if params.top_log_probs > vocabulary:
        return f"top_log_probs={params.top_log_probs}, and the model's vocabulary has {vocabulary} tokens"
    if params.stop and not can_decode:
        return (
            f"stop={list(params.stop)} are texts, and this engine was built without `decode`: give it "
            "one, or use stop_token_ids"
        )
    return None


class SamplingPlan:
    """The needs of all rows of a step; what no row needs is left out of the step.

    It serves all steps of the same rows, so that a step need not look at each of them.
    """

    def __init__(self, needs: Sequence[int]) -> None:
        self._needs = needs
        self._known: dict[tuple[int, int, int | None], list[int]] = {}
        self._indices: dict[tuple[int, int, int | None], Tensor] = {}
        self.asked = 0
        """All needs of all rows."""
        for kind in set(needs):
            self.asked |= kind

    def any(self, needs: int) -> bool:
        """Return whether some row asks for one of `needs`."""
        return bool(self.asked & needs)

    def rows(self, need: int, start: int = 0, stop: int | None = None) -> list[int]:
        """Return the rows from `start` to `stop` that ask for `need`, counted from `start`."""
        if not self.asked & need:
            return []
        known = self._known.get((need, start, stop))
        if known is None:
            known = [row for row, needs in enumerate(self._needs[start:stop]) if needs & need]
            self._known[(need, start, stop)] = known
        return known

    def index(self, device: torch.device, need: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return `rows` as a tensor on a device."""
        known = self._indices.get((need, start, stop))
        if known is None:
            known = self._indices[(need, start, stop)] = to_device(self.rows(need, start, stop), device)
        return known


class RowSettings(NamedTuple):
    """Parameters of the rows of a step, [B] each."""

    uniform: Tensor | None
    """In [0, 1); None where all rows are greedy."""
    temperature: Tensor
    """1 for greedy rows."""
    top_k: Tensor
    """int64; the vocabulary's size: all."""
    top_p: Tensor
    min_p: Tensor
    greedy: Tensor
    """bool"""

    def part(self, rows: slice) -> RowSettings:
        """Return the settings of some rows."""
        uniform = None if self.uniform is None else self.uniform[rows]
        return RowSettings(uniform, *(column[rows] for column in self[1:]))


class ChosenTokens(NamedTuple):
    """Chosen tokens, [B] each."""

    tokens: Tensor
    """int64"""
    log_probs: Tensor
    """Nats, of softmax(logits / temperature) over the whole vocabulary."""
    normalizer: Tensor
    """logsumexp(logits / temperature)."""
    short: Tensor | None = None
    """bool: the leaders did not suffice, so that the token may be a wrong one. None: all are right."""

    def facts(self, stops: Tensor) -> Tensor:
        """Return what the host has to know, in one tensor [B, 3] int64, or [B, 4] with `short`.

        Tokens, the bits of their log-probs in float64, whether they are among `stops` [B, S], which end rows.
        """
        ends = (self.tokens[:, None] == stops).any(-1)
        columns = [self.tokens, self.log_probs.double().view(torch.int64), ends]
        if self.short is not None:
            columns.append(self.short)
        return torch.stack(columns, 1)


Edit = Callable[[Tensor, slice], Tensor]
"""(logits [n, V], the rows they belong to) -> the logits by which tokens are chosen."""


def sample(
    logits: Tensor,
    plan: SamplingPlan,
    settings: RowSettings,
    edit: Edit | None = None,
    *,
    ahead: bool = False,
) -> ChosenTokens:
    """Sample one token for each row of logits [B, V], float32 or float64.

    Log-probs are log softmax(logits / temperature): what training computes, whatever `edit`, min-p, top-k and
    top-p did to the choice. `ahead`: never wait for the device, but say which tokens may be wrong.
    """
    count = len(logits)
    number = 1
    # at least two rows each: torch sums a single long one in another order where it has threads
    if logits.device.type == "cpu":
        number = max(1, count // max(2, CHUNK_BYTES // (logits.shape[1] * logits.element_size())))
    if number == 1:
        return _sample(logits, plan, settings, edit, slice(0, count), ahead)
    parts = [slice(count * part // number, count * (part + 1) // number) for part in range(number)]
    chosen = [_sample(logits[rows], plan, settings.part(rows), edit, rows, ahead) for rows in parts]
    tokens, log_probs, normalizer, short = zip(*chosen)
    joined = None if short[0] is None else torch.cat(short)
    return ChosenTokens(torch.cat(tokens), torch.cat(log_probs), torch.cat(normalizer), joined)


def _sample(
    logits: Tensor, plan: SamplingPlan, settings: RowSettings, edit: Edit | None, rows: slice, ahead: bool
) -> ChosenTokens:
    by_temperature = plan.any(TEMPERATURE)
    scaled = logits
    if by_temperature:
        scaled = logits / settings.temperature[:, None]
    by_softmax = not _has_bits_of_training(logits.device) and edit is None and not plan.any(MIN_P)
    total: Tensor | None
    if by_softmax:
        weights = scaled.softmax(-1)
        total = torch.ones_like(settings.temperature, dtype=weights.dtype)
        normalizer = None
    else:
        weights, total, normalizer = exponentials(scaled)
    edited = logits if edit is None else edit(logits, rows)
    tokens = None
    short = None
    probabilities = weights
    if plan.any(DRAWN):
        assert settings.uniform is not None, "sampled rows need their uniform numbers"
        if edited is not logits:
            weights, total, _ = exponentials(
                edited / settings.temperature[:, None] if by_temperature else edited
            )
        if plan.any(MIN_P):
            _drop_below(weights, settings.min_p)
            total = None
        if leading := plan.rows(LEADING, rows.start, rows.stop):
            beyond = plan.any(BEYOND)
            if ahead:
                floor, short = _floor_ahead(weights, plan, settings, total, rows)
            elif len(leading) == len(weights):
                floor = probability_floor(weights, settings.top_k, settings.top_p, total, beyond=beyond)
            else:
                index = plan.index(weights.device, LEADING, rows.start, rows.stop)
                limits = (settings.top_k[index], settings.top_p[index])
                floor = weights.new_zeros(len(weights))
                floor[index] = probability_floor(weights[index], *limits, beyond=beyond)
            _drop_below(weights, floor)
        has_zeros = by_softmax or edit is not None or plan.any(MIN_P | LEADING)
        tokens = draw(weights, settings.uniform, has_zeros=has_zeros)
    if plan.any(GREEDY):
        best = edited.argmax(-1)
        tokens = best if tokens is None else torch.where(settings.greedy, best, tokens)
    assert tokens is not None, "a row is drawn or greedy"
    chosen = scaled.gather(-1, tokens[:, None])[:, 0]
    if normalizer is None:
        log_probs = probabilities.gather(-1, tokens[:, None])[:, 0].log_()
        return ChosenTokens(tokens, log_probs, chosen - log_probs, short)
    return ChosenTokens(tokens, chosen - normalizer, normalizer, short)


def _has_bits_of_training(device: torch.device) -> bool:
    """Return whether log-probs need the bits of `log_probs_from_logits`, as exact mode wants them on a CPU.

    Elsewhere one softmax takes the place of four passes over the logits.
    """
    return device.type == "cpu"


def exponentials(scaled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(x - max x), its sum and logsumexp(x) of each row of [n, V] -> [n, V], [n], [n].

    The last in the very operations of `torch.logsumexp`, on which `log_probs_from_logits` stands: one pass of
    exponentials serves all.
    """
    largest = scaled.amax(-1, keepdim=True)
    weights = (scaled - largest).exp_()
    total = weights.sum(-1)
    return weights, total, total.log().add_(largest[:, 0])


def draw(weights: Tensor, uniform: Tensor, *, has_zeros: bool = True) -> Tensor:
    """Invert the cumulative distribution: weights [B, V] ≥ 0 with any sum, uniform [B] in [0, 1) -> [B]
    int64.

    With `has_zeros` a token without weight is never drawn, also where parallel sums (CUDA) round up behind
    the last one that has some.
    """
    vocabulary = weights.shape[-1]
    if vocabulary <= ONE_LEVEL:
        sums = _running_sums(weights, has_zeros)
        found = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)
    else:
        whole = vocabulary // BLOCK * BLOCK
        blocks = weights[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
        if whole < vocabulary:
            blocks = torch.cat([blocks, weights[:, whole:].sum(-1, keepdim=True)], -1)
        sums = _running_sums(blocks, True)
        threshold = uniform[:, None] * sums[:, -1:]
        block = torch.searchsorted(sums, threshold, right=True).clamp_(max=blocks.shape[-1] - 1)
        before = sums.gather(-1, (block - 1).clamp_(min=0)).masked_fill_(block == 0, 0)
        places = block * BLOCK + torch.arange(BLOCK, device=weights.device)
        inside = weights.gather(-1, places.clamp(max=vocabulary - 1)).masked_fill_(places >= vocabulary, 0)
        sums = _running_sums(inside, True)
        # the two ways to sum a block may differ by a rounding: the threshold stays below what the block holds
        below = sums[:, -1:] * (1 - torch.finfo(sums.dtype).eps / 2)
        found = block * BLOCK + torch.searchsorted(sums, torch.minimum(threshold - before, below), right=True)
    # clamped only for rows that are not finite, which the caller turns into errors
    return found[:, 0].clamp_(max=vocabulary - 1)


def _running_sums(weights: Tensor, has_zeros: bool) -> Tensor:
    """Sums up to each place [n, V], which rise only at places with weight."""
    sums = weights.cumsum(-1)
    if not has_zeros:
        return sums
    return sums.mul_(torch.gt(weights, 0, out=torch.empty_like(weights))).cummax(-1).values


def _drop_below(weights: Tensor, floor: Tensor) -> None:
    """Set weights [n, V] below floor [n] to 0, in place, in a fifth of the time of a masked fill."""
    weights.mul_(torch.ge(weights, floor[:, None], out=torch.empty_like(weights)))


def probability_floor(
    weights: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None = None, *, beyond: bool = True
) -> Tensor:
    """The smallest weight that stays in each row of weights [n, V]: top_k [n] int64, top_p [n] -> [n].

    `total` [n]: the sums of the rows, where they are known. `beyond`: it may lie behind the LEADERS most
    probable tokens; else each top_k is at most as large, and nothing waits for the device.
    """
    vocabulary = weights.shape[-1]
    if total is None:
        total = weights.sum(-1)
    if vocabulary <= ONE_LEVEL:
        return _floor_among(vocabulary, weights, top_k, top_p, total)[0]
    floor, short = _floor_among(LEADERS, weights, top_k, top_p, total)
    if beyond and len(rows := short.nonzero()[:, 0]):
        floor[rows] = _floor_among(vocabulary, weights[rows], top_k[rows], top_p[rows], total[rows])[0]
    return floor


def _floor_ahead(
    weights: Tensor, plan: SamplingPlan, settings: RowSettings, total: Tensor | None, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """The floor of all rows [n] without a wait, and for which rows it may be a wrong one, or None.

    0 for rows that leave out nothing. Rows that the plan has as WHOLE are right.
    """
    vocabulary = weights.shape[-1]
    limits = (settings.top_k, settings.top_p, weights.sum(-1) if total is None else total)
    size = vocabulary
    if vocabulary > ONE_LEVEL:
        size = MANY_LEADERS if plan.any(BEYOND) else LEADERS
    floor, short = _floor_among(min(size, vocabulary), weights, *limits)
    if plan.rows(WHOLE, rows.start, rows.stop) and size < vocabulary:
        whole = plan.index(weights.device, WHOLE, rows.start, rows.stop)
        right = _floor_among(vocabulary, weights[whole], *(limit[whole] for limit in limits))[0]
        floor.index_copy_(0, whole, torch.where(short[whole], right, floor[whole]))
        short.index_fill_(0, whole, False)
    everything = (settings.top_k >= vocabulary) & (settings.top_p >= 1)
    floor = floor.masked_fill(everything, 0)
    if size >= vocabulary or not plan.any(BEYOND):
        return floor, None
    return floor, short & ~everything


def _floor_among(
    size: int, weights: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """The floor by the `size` largest of each row, and for which rows they do not suffice: [n] each.

    Of the k largest, the fewest that reach top_p of what these k hold; a weight equal to the smallest stays
    too, so that the order of equal ones does not matter. A row falls short that neither has its k among them
    nor reaches its share with them.
    """
    limit = top_k[:, None]
    share = top_p[:, None]
    leaders = largest(weights, size)
    ranks = torch.arange(size, device=weights.device)
    held = (leaders * (ranks < limit)).cumsum(-1)
    enough = (share * torch.where(limit <= size, held[:, -1:], total[:, None])).masked_fill_(
        share >= 1, float("inf")
    )
    kept = ((held - leaders < enough) & (ranks < limit)).sum(-1, keepdim=True)
    floor = leaders.gather(-1, (kept - 1).clamp_(min=0))[:, 0]
    return floor, ((limit > size) & (held[:, -1:] < enough))[:, 0]


def largest(weights: Tensor, count: int) -> Tensor:
    """The `count` largest of each row of weights [n, V], the largest first: [n, count]."""
    vocabulary = weights.shape[-1]
    if count * BLOCK < vocabulary:  # they are all in the blocks with the largest block maxima
        whole = vocabulary // BLOCK * BLOCK
        blocks = weights[:, :whole].unflatten(-1, (-1, BLOCK))
        best = blocks.amax(-1).topk(count, sorted=False).indices
        inside = blocks.gather(1, best[..., None].expand(-1, -1, BLOCK)).flatten(1)
        weights = inside if whole == vocabulary else torch.cat([inside, weights[:, whole:]], -1)
    if count < weights.shape[-1]:
        weights = weights.topk(count, sorted=False).values
    if weights.device.type == "cpu":  # NumPy sorts many times faster than torch there
        return torch.from_numpy(np.sort(weights.numpy(), axis=-1)).flip(-1)
    return weights.sort(descending=True).values


def most_probable(
    logits: Tensor, temperature: Tensor, normalizer: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The `count` most probable tokens and their log-probs: logits [n, V], temperature and normalizer [n] ->
    [n, count] each.
    """
    values, tokens = (logits / temperature[:, None]).topk(count)
    return tokens, values - normalizer[:, None]


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch holds."""
    return value - (1 << 64) if value >= 1 << 63 else value


# splitmix64: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014)
_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def _mix(bits: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 [B]; products wrap around."""
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)


def _shift(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros (torch's own keeps the sign)."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def stream_keys(seeds: Tensor) -> Tensor:
    """Starts of the streams of seeds [B] int64 -> [B] int64, mixed: neighbouring seeds share nothing."""
    return _mix(seeds + _STEP)


def uniforms(keys: Tensor, positions: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number in [0, 1) for each (key, position), both [B] int64: 24 random bits in float32, 53 in
    float64, never rounded to 1.
    """
    bits = _mix(keys + positions * _STEP)
    kept = 53 if dtype == torch.float64 else 24
    return _shift(bits, 64 - kept).to(dtype) * 2.0**-kept
