"""Conversion between padded rows and packed tokens.

`make_rows` turns token lists into the padded columns that the driver holds (prompts left-padded, responses
right-padded). `pack` turns those columns into the tokens of a forward pass, with no padding in them;
`PackedBatch.unpack` brings the model's outputs for each sampled token back to [B, R].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybridflow.protocol.columns import BatchError
from hybridflow.protocol.data_proto import DataProto
from hybridflow.protocol.prompt import MEDIA, Medium, make_position_ids


@dataclass(frozen=True)
class PlacedMedium:
    """A medium, or a part of it, among the tokens of a forward pass."""

    place: int
    """The index among the N tokens of its token number `first`."""
    medium: Medium
    first: int
    count: int
    """Number of its tokens among the N."""


ROUTES = "routed_experts"
"""The column of the experts that tokens went to; see the field table."""
TOP_OUTCOMES = "teacher_top_outcomes"
"""The column of the teacher's most likely tokens; see the field table."""


@dataclass(frozen=True)
class PackedBatch:
    """The rows of a micro-batch one after the other, without padding: N tokens in all, M of them predicted.

    Example: rows `[1 2 | 3 4]` and `[5 | 6]` (prompt | response) give input_ids `1 2 3 4 5 6`, position_ids
    `0 1 2 3 0 1`, lengths `(4, 2)`, prompt_lengths `(2, 1)`, targets `3 4 6` and predict_index `1 2 4`. If a
    tool has given the token 3, targets are `4 6` and predict_index is `2 4`.
    """

    input_ids: Tensor
    """[N] int64."""
    position_ids: Tensor
    """[N] int64, from 0 in each row; [3, N] where media have three positions for each token."""
    lengths: tuple[int, ...]
    """Tokens of each row; their sum is N, unless rows share a prompt."""
    prompt_lengths: tuple[int, ...]
    """Prompt tokens of each row."""
    predict_index: Tensor
    """[M] int64: which of the N positions predicts the target, the one before it."""
    predict_index_on_cpu: Tensor
    """The same on the CPU, so that no device is waited for where the host must know it."""
    targets: Tensor
    """[M] int64: the response tokens that the policy sampled; given ones are read and never predicted."""
    rows: Tensor
    """[M] int64: row of the target in [B, R]."""
    columns: Tensor
    """[M] int64: column of the target in [B, R]."""
    shape: tuple[int, int]
    """(B, R)."""
    places: Tensor | None = None
    """[sum of lengths] int64, always on the CPU: which of the N tokens each token of each row is, where rows
    share their prompt's.
    """
    routes: Tensor | None = None
    """[N, W] int16: the experts of each token as the column `routed_experts` has them; None without it."""
    top_outcomes: Tensor | None = None
    """[M, 2k + 1] float32: the teacher's most likely tokens at each target; None without the column."""
    media: tuple[PlacedMedium, ...] = ()
    """The media of all rows, with their values on the CPU."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens N."""
        return int(self.input_ids.shape[0])

    def unpack(self, values: Tensor, fill: float = 0.0) -> Tensor:
        """Values [M, …] at their places in [B, R, …], `fill` elsewhere; gradients flow back to `values`."""
        out = torch.full((*self.shape, *values.shape[1:]), fill, dtype=values.dtype, device=values.device)
        return out.index_put((self.rows.to(values.device), self.columns.to(values.device)), values)

    def gather(self, field: Tensor) -> Tensor:
        """The entries [M] of a padded field [B, R] at the targets: the opposite of `unpack`."""
        return field[self.rows.to(field.device), self.columns.to(field.device)]

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a forward pass reads on its device, by name of the field."""
        names = ("input_ids", "position_ids", "predict_index", "targets", "rows", "columns")
        found = {name: getattr(self, name) for name in (*names, "routes", "top_outcomes")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> PackedBatch:
        """The same batch with these in place of its `tensors`, by the same names."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with its tensors on `device`."""
        return self.with_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})

    def unpack_tokens(self, values: Tensor, attention_mask: Tensor, fill: int) -> Tensor:
        """Values [N, W] of all tokens at their places in [B, T, W], with `attention_mask` [B, T]; `fill`
        elsewhere.
        """
        if self.places is not None:
            values = values[self.places.to(values.device)]
        out = values.new_full((*attention_mask.shape, values.shape[1]), fill)
        out[attention_mask.bool().to(values.device)] = values
        return out


def pack(batch: DataProto) -> PackedBatch:
    """Drop the padding of `input_ids` [B, T] by `attention_mask` [B, T]; of the last R columns, the response,
    the tokens of `response_mask` [B, R] are predicted.

    Raises BatchError for a row without tokens, a sampled token without a token before it (nothing predicts
    it), and for `responses` [B, R], where the batch has them, that are not the tail of `input_ids`.
    """
    input_ids = batch.batch["input_ids"]
    attended = batch.batch["attention_mask"].bool()
    sampled = batch.batch["response_mask"].bool()
    num_rows, width = sampled.shape
    start = input_ids.shape[1] - width
    if start < 0 or attended.shape != input_ids.shape or len(input_ids) != num_rows:
        raise BatchError(
            f"cannot pack: input_ids {tuple(input_ids.shape)}, attention_mask {tuple(attended.shape)}, "
            f"response_mask {tuple(sampled.shape)}; wanted [B, P+R], [B, P+R] and [B, R]"
        )
    lengths = tuple(attended.sum(dim=1).tolist())
    if 0 in lengths:
        raise BatchError(f"cannot pack: row {lengths.index(0)} has no attended token")
    in_row = attended.cumsum(dim=1) - 1  # place of each token in its row
    in_all = (attended.reshape(-1).cumsum(dim=0) - 1).reshape(attended.shape)  # and among the N
    written = attended[:, start:]
    tail = input_ids[:, start:]
    if not torch.equal(batch.batch.get("responses", tail)[written], tail[written]):
        raise BatchError(
            "cannot pack: `responses` differs from the last columns of `input_ids`; change both together"
        )
    rows, columns = (sampled & written).nonzero(as_tuple=True)
    orphans = in_row[rows, start + columns] == 0
    if bool(orphans.any()):
        raise BatchError(
            f"cannot pack: row {int(rows[orphans][0])} has no prompt token, so nothing predicts its first "
            "response token"
        )
    predict_index = in_all[rows, start + columns] - 1
    routes = None
    if ROUTES in batch:
        routes = batch.batch[ROUTES][attended]
    told = None
    if TOP_OUTCOMES in batch:
        told = batch.batch[TOP_OUTCOMES][rows, columns]
    position_ids = in_row[attended]
    placed: tuple[PlacedMedium, ...] = ()
    if MEDIA in batch:
        position_ids, placed = _with_media(list(batch.non_tensor_batch[MEDIA]), lengths, position_ids)
    return PackedBatch(
        input_ids=input_ids[attended],
        position_ids=position_ids,
        lengths=lengths,
        prompt_lengths=tuple(attended[:, :start].sum(dim=1).tolist()),
        predict_index=predict_index,
        predict_index_on_cpu=predict_index.cpu(),
        targets=tail[rows, columns],
        rows=rows,
        columns=columns,
        shape=(num_rows, width),
        routes=routes,
        top_outcomes=told,
        media=placed,
    )


def _with_media(
    column: Sequence[tuple[Medium, ...] | None], lengths: Sequence[int], position_ids: Tensor
) -> tuple[Tensor, tuple[PlacedMedium, ...]]:
    """Return the positions of packed rows, [N] or [3, N], and their media among the N tokens."""
    placed = []
    start = 0
    of_rows = [media or () for media in column]
    for media, length in zip(of_rows, lengths, strict=True):
        placed += [PlacedMedium(start + medium.start, medium, 0, medium.length) for medium in media]
        start += length
    if any(each.medium.positions is not None for each in placed):
        rows = zip(of_rows, lengths, strict=True)
        parts = [make_position_ids(length, media).expand(3, -1) for media, length in rows]
        position_ids = torch.cat(parts, dim=1)
    return position_ids, tuple(placed)


def share_prompts(packed: PackedBatch) -> PackedBatch:
    """Return the same rows with every prompt stored once, however many rows begin with it.

    What is predicted and its place in [B, R] stay as they were. `packed` itself is returned where no two rows
    share a prompt. It works on the CPU, before `to`.
    """
    ids = packed.input_ids.numpy()
    digests = sorted((each.place, each.medium.digest) for each in packed.media)
    known: dict[object, int] = {}
    places = torch.empty(packed.num_tokens, dtype=torch.int64)
    kept = []
    start = 0
    num_kept = 0
    for length, prompt in zip(packed.lengths, packed.prompt_lengths, strict=True):
        end = start + length
        pictures = tuple((at - start, name) for at, name in digests if start <= at < start + prompt)
        first = known.get(key := (ids[start : start + prompt].tobytes(), pictures))
        own = start if first is None else start + prompt
        if first is None:
            known[key] = num_kept
        else:
            places[start:own] = torch.arange(first, first + prompt)
        places[own:end] = torch.arange(num_kept, num_kept + end - own)
        kept.append(torch.arange(own, end))
        num_kept += end - own
        start = end
    if num_kept == packed.num_tokens:
        return packed
    keep = torch.cat(kept)
    input_ids = packed.input_ids[keep]
    position_ids = packed.position_ids[..., keep]
    predict_index = places[packed.predict_index]
    routes = None
    if packed.routes is not None:
        routes = packed.routes[keep]
    kept_places = set(keep.tolist())
    media = [
        replace(each, place=int(places[each.place])) for each in packed.media if each.place in kept_places
    ]
    return replace(
        packed,
        routes=routes,
        input_ids=input_ids,
        position_ids=position_ids,
        predict_index=predict_index,
        predict_index_on_cpu=predict_index,
        places=places,
        media=tuple(media),
    )


def prompt_groups(batch: DataProto) -> list[int]:
    """A number for each row, the same for rows that begin with the same prompt, in order of appearance.

    Prompts of equal tokens are the same only with equal media; media behind the prompt do not count.
    """
    width = batch.batch["response_mask"].shape[1]
    prompts, attended = (
        batch.batch[name][:, : batch.batch["input_ids"].shape[1] - width]
        for name in ("input_ids", "attention_mask")
    )
    media = batch.non_tensor_batch.get(MEDIA, [()] * len(batch))
    numbers: dict[object, int] = {}
    groups = []
    for ids, mask, own in zip(prompts.cpu().numpy(), attended.cpu().bool().numpy(), media, strict=True):
        read = tuple(medium for medium in own or () if medium.start < mask.sum())
        groups.append(numbers.setdefault((ids.tobytes(), mask.tobytes(), read), len(numbers)))
    return groups


def make_rows(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    pad_id: int,
    *,
    prompt_width: int | None = None,
    response_width: int | None = None,
    response_masks: Sequence[Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """Padded columns from token lists: prompts to the right edge of [B, P], responses to the left edge of [B,
    R].

    Returns `prompts` [B, P], `responses` [B, R], `input_ids` [B, P+R] int64, `attention_mask` [B, P+R],
    `response_mask` [B, R] bool. Widths default to the longest row. `response_masks` marks the tokens the
    policy sampled (default: all). Raises BatchError where the lists do not match or a row is longer than the
    width asked for.
    """
    masks = response_masks
    if masks is None:
        masks = [[1] * len(row) for row in responses]
    if not len(prompts) == len(responses) == len(masks):
        raise BatchError(
            f"rows do not match: {len(prompts)} prompts, {len(responses)} responses, {len(masks)} response "
            "masks"
        )
    for row, (tokens, mask) in enumerate(zip(responses, masks, strict=True)):
        if len(tokens) != len(mask):
            raise BatchError(f"row {row}: {len(tokens)} response tokens but {len(mask)} mask values")
    prompt_ids, prompt_mask = _pad(prompts, pad_id, prompt_width, "prompt", left=True)
    response_ids, response_attended = _pad(responses, pad_id, response_width, "response", left=False)
    sampled, _ = _pad(masks, 0, response_ids.shape[1], "response mask", left=False)
    return {
        "prompts": prompt_ids,
        "responses": response_ids,
        "input_ids": torch.cat([prompt_ids, response_ids], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_attended], dim=1),
        "response_mask": sampled.bool(),
    }


def _pad(
    rows: Sequence[Sequence[int]], pad_id: int, width: int | None, what: str, *, left: bool
) -> tuple[Tensor, Tensor]:
    longest = max((len(row) for row in rows), default=0)
    if width is None:
        width = longest
    if longest > width:
        raise BatchError(f"a {what} of {longest} tokens does not fit into a width of {width}")
    ids = torch.full((len(rows), width), pad_id, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for index, row in enumerate(rows):
        where = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, where] = torch.as_tensor(list(row), dtype=torch.int64)
        mask[index, where] = True
    return ids, mask
