"""Prompts and responses of a step, as JSONL files that people and the report read.

    scored batch ──sample_rows──► one dict a row ──SampleWriter──► {folder}/{step}.jsonl

A row holds step, prompt, response, score, ground_truth, extra_info, finish_reason, data_source, the further
scores that the reward returned, and last uid and row_id. With `token_level` it also holds `tokens`, a dict of
equally long lists over the response's tokens: text, rollout_log_probs, old_log_probs, advantages,
response_mask, loss_mask (those that the batch has).

A row with pictures has them as `media`, in the order of their places: kind, placeholder (its text
in the prompt, once), tokens, digest and picture, a data URL of a small PNG or JPEG, and `in_response` where a
tool or an environment gave it, so that its place is in the response. A file holds each picture
once, in the first row that shows it, and no more of them than fit into PICTURE_BYTES.
"""

from __future__ import annotations

import base64
import json
import numbers
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridflow.errors import ConfigError
from hybridflow.protocol.prompt import MEDIA, Medium

if TYPE_CHECKING:
    from torch import Tensor

    from hybridflow.protocol import DataProto

SampleRow = Mapping[str, Any]
Decode = Callable[[Sequence[int]], str]
PICTURE_BYTES = 2**20
"""Most bytes of pictures in a file."""
ROW_PICTURES = 16
"""Most pictures of a row that are kept; the others are named."""
TOKEN_FIELDS = (
    "rollout_log_probs",
    "old_log_probs",
    "ref_log_prob",
    "advantages",
    "values",
    "entropys",
    "policy_version",
    "response_mask",
    "loss_mask",
)
_NO_SCORES = {
    *("uid", "finish_reason", "data_source", "reward_model", "ground_truth"),
    *("solution_str", "extra_info", "index", "raw_prompt", "ability"),
}
"""Columns beside which all numbers are scores of the reward."""


class SampleWriter:
    """Writes the samples of each step into a separate file in `folder`, again after a resume.

    With `keep_to`, files of later steps are removed first: they belong to a run that is replaced.
    """

    def __init__(self, folder: str | Path, *, keep_to: int | None = None) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for file in self.folder.glob("*.jsonl"):
                if keep_to is not None and file.stem.isdigit() and int(file.stem) > keep_to:
                    file.unlink()
        except OSError as error:
            raise ConfigError(
                f"the sample folder {self.folder} cannot be written ({error}): set "
                "trainer.rollout_data_dir or trainer.validation_data_dir to a folder that you may write"
            ) from error

    def write(self, rows: Sequence[SampleRow], step: int) -> Path:
        """Write the rows of a step, whole or not at all, and return the file."""
        target = self.folder / f"{step}.jsonl"
        partial = target.with_suffix(".jsonl.partial")
        # half of a surrogate pair, which no UTF-8 file can hold, becomes its backslash escape: valid JSON
        # that reads back the same
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            for row in _each_picture_once(rows):
                file.write(json.dumps({"step": step, **row}, ensure_ascii=False, default=_plain) + "\n")
        os.replace(partial, target)
        return target


def _each_picture_once(rows: Sequence[SampleRow]) -> Iterator[SampleRow]:
    """Yield the rows of a file, without pictures that an earlier row has or that are too much for it."""
    seen: set[str] = set()
    left = PICTURE_BYTES
    for row in rows:
        if MEDIA not in row:
            yield row
            continue
        media = []
        for medium in row[MEDIA]:
            picture = medium.get("picture", "")
            if medium["digest"] in seen or len(picture) > left:
                picture = ""
            if picture:
                seen.add(medium["digest"])
                left -= len(picture)
            facts = {name: value for name, value in medium.items() if name != "picture"}
            media.append(facts | ({"picture": picture} if picture else {}))
        yield {**row, MEDIA: media}


def sample_rows(
    batch: DataProto, decode: Decode, *, token_level: bool = False, max_rows: int | None = None
) -> list[dict[str, Any]]:
    """Return the first `max_rows` rows of a scored batch as plain dicts; None: all.

    `decode` turns token ids into text with special tokens (a tokenizer's `decode`). The score is the sum of
    token_level_scores [B, R] over all rows of the trajectory.
    """
    count = len(batch)
    if max_rows is not None:
        count = min(count, max_rows)
    columns: dict[str, Tensor] = {str(name): batch.batch[name][:count].cpu() for name in batch.batch.keys()}  # noqa: SIM118
    prompt_width = columns["prompts"].shape[1]
    attended = columns["attention_mask"].bool()
    no_media = [()] * count
    pieces: dict[int, str] = {}
    scores = _scores(batch)
    rows = []
    # arrays: to index one row of a tensor takes several times as long
    prompts = columns["prompts"].numpy()
    responses = columns["responses"].numpy()
    masks = attended.numpy()
    texts: dict[tuple[int, ...], str] = {}  # prompts of a group are one text
    for index in range(count):
        prompt = prompts[index][masks[index, :prompt_width]].tolist()
        here = attended[index, prompt_width:]
        response = responses[index][masks[index, prompt_width:]].tolist()
        media = batch.non_tensor_batch.get(MEDIA, no_media)[index] or ()
        key = tuple(prompt)
        if media or key not in texts:
            texts[key] = _text(prompt, media, 0, decode)
        row: dict[str, Any] = {
            "prompt": texts[key],
            "response": _text(response, media, len(prompt), decode),
            "num_tokens": len(response),
        }
        if media:
            row[MEDIA] = _media([*prompt, *response], media, len(prompt), decode)
        if scores:
            row["score"] = scores[index]
        row |= _facts(batch, index)
        if token_level:
            row["tokens"] = _token_columns(columns, index, here, response, decode, pieces)
        if "uid" in batch.non_tensor_batch:
            row["uid"] = batch.non_tensor_batch["uid"][index]
        if "row_id" in columns:
            row["row_id"] = int(columns["row_id"][index])
        rows.append(row)
    return rows


def _text(ids: Sequence[int], media: Sequence[Medium], first: int, decode: Decode) -> str:
    """Return the text of the ids of a row from its token `first` on, each medium with one placeholder."""
    text = ""
    done = 0
    for medium in media:
        if first <= medium.start < first + len(ids):
            place = medium.start - first
            text += decode(ids[done : place + 1])
            done = place + medium.length
    return text + decode(ids[done:])


def _media(
    ids: Sequence[int], media: Sequence[Medium], num_prompt: int, decode: Decode
) -> list[dict[str, Any]]:
    entries = []
    for number, medium in enumerate(media):
        entry = {
            "kind": medium.kind,
            "placeholder": decode(ids[medium.start : medium.start + 1]),
            "tokens": medium.length,
            "digest": medium.digest[:16],
        }
        if medium.start >= num_prompt:
            entry["in_response"] = True
        if medium.shown and number < ROW_PICTURES:
            form = "png" if medium.shown.startswith(b"\x89PNG") else "jpeg"
            entry["picture"] = f"data:image/{form};base64,{base64.b64encode(medium.shown).decode()}"
        entries.append(entry)
    return entries


def rollout_columns(batch: DataProto) -> dict[str, list[Any]]:
    """Return the numbers of all rows of a scored batch, a list for each column that it has, without texts.

    `num_tokens` is the length of the response, and `key` is the same for the same prompt.
    """
    count = len(batch)
    columns: dict[str, list[Any]] = {
        name: list(batch.non_tensor_batch[name])
        for name in ("uid", "finish_reason")
        if name in batch.non_tensor_batch
    }
    if "row_id" in batch:
        columns["row_id"] = [str(number) for number in batch.batch["row_id"].tolist()]
    if "trajectory_id" in batch:
        columns["trajectory_id"] = batch.batch["trajectory_id"].tolist()
    if scores := _scores(batch):
        columns["score"] = [_short(score) for score in scores]
    if "prompts" not in batch or "attention_mask" not in batch:
        return columns
    prompts = batch.batch["prompts"].cpu()
    attended = batch.batch["attention_mask"].bool().cpu()
    width = prompts.shape[1]
    columns["num_tokens"] = attended[:, width:].sum(1).tolist()
    keys: dict[Any, str] = {}
    uids = columns.get("uid", range(count))
    for index, uid in enumerate(uids):
        if uid not in keys:
            ids = prompts[index][attended[index, :width]].long()
            keys[uid] = f"{zlib.crc32(ids.numpy().tobytes()):08x}"
    columns["key"] = [keys[uid] for uid in uids]
    return columns


def _scores(batch: DataProto) -> list[float]:
    """Return the score of each row's trajectory; nothing where there are no scores."""
    if "token_level_scores" not in batch:
        return []
    scores = [float(values.sum()) for values in batch.batch["token_level_scores"]]
    if "trajectory_id" not in batch:
        return scores
    ids = batch.batch["trajectory_id"].tolist()
    totals = dict.fromkeys(ids, 0.0)
    for trajectory, score in zip(ids, scores, strict=True):
        totals[trajectory] += score
    return [totals[trajectory] for trajectory in ids]


def _facts(batch: DataProto, index: int) -> dict[str, Any]:
    """Return the data of a row, why its response ended, the scores of the reward and, of an agent's
    trajectory, the conversation and which of its rows this one is.
    """
    told = {name: column[index] for name, column in batch.non_tensor_batch.items()}
    row: dict[str, Any] = {}
    if "ground_truth" in told:
        row["ground_truth"] = told["ground_truth"]
    elif isinstance(told.get("reward_model"), Mapping):
        row["ground_truth"] = told["reward_model"].get("ground_truth")
    info = told.get("extra_info")
    if info:
        row["extra_info"] = info
    if isinstance(info, Mapping) and info:
        row["extra_info"] = {name: value for name, value in info.items() if name != "messages"}
    row |= {name: told[name] for name in ("finish_reason", "data_source") if name in told}
    for name, value in told.items():
        if name not in _NO_SCORES and (isinstance(value, numbers.Real) or hasattr(value, "item")):
            row[name] = _plain(value)
    if "trajectory_id" in batch and isinstance(info, Mapping) and "messages" in info:
        row["trajectory_id"] = int(batch.batch["trajectory_id"][index])
        row["lineage"] = int(batch.batch["lineage"][index])
        if info["messages"] and row["lineage"] == 0:
            row["messages"] = info["messages"]
    return row


def _token_columns(
    columns: Mapping[str, Tensor],
    index: int,
    here: Tensor,
    response: list[int],
    decode: Decode,
    pieces: dict[int, str],
) -> dict[str, list[Any]]:
    for token in response:
        if token not in pieces:
            pieces[token] = decode([token])
    tokens: dict[str, list[Any]] = {"text": [pieces[token] for token in response]}
    for name in TOKEN_FIELDS:
        if name in columns:
            values = columns[name][index][here].tolist()
            # six digits are enough to look at and halve the file
            tokens[name] = [_short(value) for value in values]
    return tokens


def _short(value: bool | float) -> float:
    if isinstance(value, bool):
        return int(value)
    return float(f"{value:.6g}")


def _plain(value: Any) -> Any:
    """Return a value for JSON: arrays and tensors as lists, numbers, anything else as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, numbers.Real):
        return value
    return str(value)
