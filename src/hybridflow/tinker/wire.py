"""The three messages that Tinker's client sends and reads as protocol buffers, without a library for them.

body ──read_forward_backward──► ForwardBackward      outputs ──write_outputs, write_samples──► bytes

Numbers of fields are those of version 0.38 of the client.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridflow.rollout.base import GenerationOutput

DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<f4"), 2: np.dtype("<i8"), 3: np.dtype("<i4")}
"""Element types of tensors by their number: float32, int64, int32."""
MAX_NUMBERS = 2**18
"""Most numbers of one tensor of a row, also where its zeros are not sent: 2**19 targets took 0.6 GB."""
MAX_CELLS = 2**24
"""Most numbers of all tensors of a body."""
MAX_INPUTS = 16
"""Most tensors of a row; no loss reads more than five."""
MAX_SEQ = 2**63 - 1
"""Largest number of a request."""
Value = int | bytes
Fields = dict[int, list[Value]]
"""Values of a message by the number of the field: an integer, or bytes."""


class Refusal(ValueError):
    """A request that cannot be served as it is: the reason is for its sender."""

    status = 400


class WireError(Refusal):
    """A body that is no message of this kind."""


@dataclass(frozen=True)
class Datum:
    """One row: the tokens that are read, and what the loss wants of each of them."""

    tokens: Tensor
    """[N] int64; the token at place i predicts the target at place i."""
    inputs: dict[str, Tensor]
    """[N] or [N, K] each, float32 or int64, by name."""


@dataclass(frozen=True)
class ForwardBackward:
    """A request for log-probs, and for gradients unless `forward_only`."""

    model_id: str
    seq_id: int
    loss_fn: str
    loss_fn_config: dict[str, float | str]
    data: list[Datum]
    forward_only: bool


def read_fields(data: bytes) -> Fields:
    """Return the fields of a message; WireError where it is cut or has a group."""
    found: Fields = {}
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        value: Value
        if kind == 0:
            value, place = _varint(data, place)
        else:
            if kind == 2:
                size, place = _varint(data, place)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise WireError(f"a field of wire type {kind}, which no message has")
            value = data[place : place + size]
            if len(value) < size:
                raise WireError(f"a field of {size} bytes begins {len(value)} bytes before the end")
            place += size
        found.setdefault(tag >> 3, []).append(value)
    return found


def _varint(data: bytes, place: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise WireError("the body ends inside of a number")
        number |= (data[place] & 127) << shift
        place += 1
        if not data[place - 1] & 128:
            return number, place
    raise WireError("a number has more than ten bytes")


def _bytes(fields: Fields, number: int) -> bytes:
    """Return the last value of a field, empty where it was not sent."""
    value = fields.get(number, [b""])[-1]
    if not isinstance(value, bytes):
        raise WireError(f"field {number} is a number, and bytes are wanted")
    return value


def _number(fields: Fields, number: int) -> int:
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise WireError(f"field {number} is bytes, and a number is wanted")
    return value


def _parts(fields: Fields, number: int) -> Iterator[Fields]:
    for value in fields.get(number, []):
        if not isinstance(value, bytes):
            raise WireError(f"field {number} is a number, and a message is wanted")
        yield read_fields(value)


def _text(fields: Fields, number: int) -> str:
    return _bytes(fields, number).decode()


def _double(data: bytes) -> float:
    if len(data) != 8:
        raise WireError(f"a double of {len(data)} bytes")
    return float(struct.unpack("<d", data)[0])


def read_numbers(body: bytes) -> tuple[str, int]:
    """Return the run and the number of a request for forward_backward, whatever the rest of the body is;
    WireError where it has none.
    """
    try:
        fields = read_fields(body)
        model_id, seq = _text(fields, 1), _number(fields, 2)
    except ValueError as error:
        raise WireError(f"the body is no request for forward_backward: {error}") from error
    if not 1 <= seq <= MAX_SEQ:
        raise WireError(f"seq_id={seq}: wanted a number from 1 to 2**63 - 1")
    return model_id, seq


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Return the request of a body; WireError where it cannot be read."""
    try:
        fields = read_fields(body)
        config: dict[str, float | str] = {}
        for entry in _parts(fields, 5):
            config[_text(entry, 1)] = _double(_bytes(entry, 2))
        for entry in _parts(fields, 7):
            value = read_fields(_bytes(entry, 2))
            config[_text(entry, 1)] = _text(value, 2) if 2 in value else _double(_bytes(value, 1))
        data = []
        room = MAX_CELLS
        for datum in _parts(fields, 3):
            data.append(_datum(datum))
            room -= sum(tensor.numel() for tensor in data[-1].inputs.values())
            if room < 0:
                raise WireError(f"the rows have more than {MAX_CELLS} numbers: send them in several requests")
        return ForwardBackward(
            _text(fields, 1), _number(fields, 2), _text(fields, 4), config, data, bool(_number(fields, 6))
        )
    except (RuntimeError, ValueError) as error:
        raise WireError(f"the body is no request for forward_backward: {error}") from error


def _datum(fields: Fields) -> Datum:
    tokens = []
    for chunk in _parts(fields, 1):
        if 1 not in chunk:
            raise WireError("a chunk of model_input is a picture or sound, and only encoded text is served")
        tokens.append(np.frombuffer(_bytes(read_fields(_bytes(chunk, 1)), 1), DTYPES[3]))
    ids = torch.from_numpy(np.concatenate(tokens).astype(np.int64) if tokens else np.zeros(0, np.int64))
    if len(fields.get(2, [])) > MAX_INPUTS:
        raise WireError(f"a row has {len(fields[2])} tensors of loss_fn_inputs, wanted at most {MAX_INPUTS}")
    inputs: dict[str, Tensor] = {}
    for entry in _parts(fields, 2):
        name = _text(entry, 1)
        inputs[name] = _tensor(name, read_fields(_bytes(entry, 2)))
    return Datum(ids, inputs)


def _tensor(name: str, fields: Fields) -> Tensor:
    dtype = DTYPES.get(_number(fields, 3))
    if dtype is None:
        raise WireError(
            f"a tensor of the type {_number(fields, 3)}: float32 (1), int64 (2) or int32 (3) is wanted"
        )
    shape: list[int] = []
    for value in fields.get(4, []):
        place = 0
        while isinstance(value, bytes) and place < len(value) and len(shape) < 3:  # packed
            size, place = _varint(value, place)
            shape.append(size)
        if isinstance(value, int):
            shape.append(value)
    wide: np.dtype[Any] = np.dtype(np.float32 if dtype.kind == "f" else np.int64)
    sent = len(_bytes(fields, 1)) // dtype.itemsize
    if 2 not in fields and not shape:
        shape = [sent]
    if len(shape) > 2 or max(0, *shape, math.prod(shape)) > MAX_NUMBERS:
        raise WireError(
            f"{name} has {len(shape)} sizes, {shape[:2]}: one or two are wanted, for example targets "
            f"[tokens, targets of a token], and at most {MAX_NUMBERS} numbers in a row of data"
        )
    if 2 not in fields:
        values = np.frombuffer(_bytes(fields, 1), dtype).astype(wide)
        return torch.from_numpy(values).reshape(shape)
    if len(shape) != 2:
        raise WireError(f"{name} is sparse and of the shape {shape}: two sizes are wanted")
    sparse = read_fields(_bytes(fields, 2))
    starts, columns = (np.frombuffer(_bytes(sparse, number), "<i8") for number in (2, 3))
    counts = np.diff(starts)
    whole = len(starts) == shape[0] + 1 and starts[0] == 0 and starts[-1] == len(columns)
    if not whole or (counts < 0).any():
        raise WireError(f"a sparse tensor of {shape[0]} rows whose row pointers are {starts[:9].tolist()}")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise WireError(f"a sparse tensor of {shape[1]} columns lists others")
    values = np.frombuffer(_bytes(sparse, 1), dtype)
    cells = np.repeat(np.arange(shape[0]), counts) * shape[1] + columns
    if len(values) != len(columns) or len(np.unique(cells)) != len(cells):
        raise WireError(
            f"{name} is sparse with {len(values)} values at {len(columns)} columns: wanted one value for "
            "each, and no column twice in a row"
        )
    dense = np.zeros(math.prod(shape), wide)
    dense[cells] = values
    return torch.from_numpy(dense.reshape(shape))


def number_field(number: int, value: int) -> bytes:
    """Return an integer field."""
    return _varint_of(number << 3) + _varint_of(value)


def bytes_field(number: int, value: bytes | str) -> bytes:
    """Return a field of bytes, of text, or of a message."""
    data = value.encode() if isinstance(value, str) else value
    return _varint_of(number << 3 | 2) + _varint_of(len(data)) + data


def double_field(number: int, value: float) -> bytes:
    """Return a field of a float64."""
    return _varint_of(number << 3 | 1) + struct.pack("<d", value)


def _varint_of(value: int) -> bytes:
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])


def write_outputs(log_probs: Sequence[Tensor], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: log-probs [N] or [N, K] of each row, nats, and metrics of all."""
    message = bytes_field(1, "ArrayRecord")
    for row in log_probs:
        data = row.detach().float().cpu().numpy().tobytes()
        tensor = bytes_field(1, data) + bytes_field(2, np.array([0, len(data)], "<i8").tobytes())
        tensor += number_field(3, 1) + b"".join(number_field(4, size) for size in row.shape[1:])
        record = bytes_field(2, bytes_field(1, "logprobs") + bytes_field(2, tensor))
        message += bytes_field(2, record + number_field(3, 1))
    for name, value in metrics.items():
        message += bytes_field(3, bytes_field(1, name) + double_field(2, value))
    return message


def write_samples(
    outputs: Sequence[GenerationOutput], prompt_log_probs: Tensor | None, top: int = 0
) -> bytes:
    """Return a SampleResponse: each response with its log-probs, and those of the prompt [P], nats, with NaN
    where there is none; `top` most probable tokens at each place where they were asked for.
    """
    message = b""
    for output in outputs:
        sequence = number_field(1, int(output.finish_reason != "stop"))
        sequence += bytes_field(2, np.array(output.token_ids, "<i4").tobytes())
        sequence += bytes_field(3, np.array(output.log_probs, "<f4").tobytes())
        if top:
            places = [place[:top] for place in output.top_log_probs or ()]
            ids = np.array([[token for token, _ in place] for place in places], "<i4")
            values = np.array([[value for _, value in place] for place in places], "<f4")
            sequence += bytes_field(
                4,
                bytes_field(1, ids.tobytes())
                + bytes_field(2, values.tobytes())
                + number_field(3, top)
                + number_field(4, len(places)),
            )
        message += bytes_field(1, sequence)
    if prompt_log_probs is not None:
        message += bytes_field(2, prompt_log_probs.float().cpu().numpy().tobytes())
    return message
