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
MAX_CELLS = 2**26
"""Most numbers of a tensor whose zeros are not sent."""
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
        data = [_datum(datum) for datum in _parts(fields, 3)]
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
    inputs = {_text(entry, 1): _tensor(read_fields(_bytes(entry, 2))) for entry in _parts(fields, 2)}
    return Datum(ids, inputs)


def _tensor(fields: Fields) -> Tensor:
    dtype = DTYPES.get(_number(fields, 3))
    if dtype is None:
        raise WireError(
            f"a tensor of the type {_number(fields, 3)}: float32 (1), int64 (2) or int32 (3) is wanted"
        )
    shape: list[int] = []
    for value in fields.get(4, []):
        place = 0
        while isinstance(value, bytes) and place < len(value):  # packed
            size, place = _varint(value, place)
            shape.append(size)
        if isinstance(value, int):
            shape.append(value)
    wide: np.dtype[Any] = np.dtype(np.float32 if dtype.kind == "f" else np.int64)
    if 2 not in fields:
        values = np.frombuffer(_bytes(fields, 1), dtype).astype(wide)
        return torch.from_numpy(values).reshape(shape or [-1])
    if len(shape) != 2 or math.prod(shape) > MAX_CELLS:
        raise WireError(
            f"a sparse tensor of the shape {shape}: two sizes of at most {MAX_CELLS} numbers are wanted"
        )
    sparse = read_fields(_bytes(fields, 2))
    starts, columns = (np.frombuffer(_bytes(sparse, number), "<i8") for number in (2, 3))
    counts = np.diff(starts)
    if len(counts) != shape[0] or starts[0] != 0 or starts[-1] != len(columns) or (counts < 0).any():
        raise WireError(f"a sparse tensor of {shape[0]} rows whose row pointers are {starts[:9].tolist()}")
    if ((columns < 0) | (columns >= shape[1])).any():
        raise WireError(f"a sparse tensor of {shape[1]} columns lists others")
    dense = np.zeros(shape, wide)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = np.frombuffer(_bytes(sparse, 1), dtype)
    return torch.from_numpy(dense)


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
