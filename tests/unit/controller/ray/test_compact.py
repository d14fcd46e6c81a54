"""Columns in fewer bytes are the same columns, to the bit; what gains nothing travels as it is."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.controller.ray import transport
from hybridflow.controller.ray.transport import SMALL_BYTES, decode, encode
from hybridflow.protocol import DataProto

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def sent(column: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return a column of a batch as it arrives, and the bytes that travelled."""
    packet = encode(DataProto.from_dict({"column": column}))
    return decode(packet).batch["column"], packet.nbytes


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    assert left.dtype == right.dtype and left.shape == right.shape
    return torch.equal(
        left.contiguous().reshape(-1).view(torch.uint8), right.contiguous().reshape(-1).view(torch.uint8)
    )


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(DTYPES),
    st.sampled_from([(1, 1), (3, 0), (0, 7), (1, 4096), (64, 64), (8, 1000), (5, 31, 29), (4096,), (4097,)]),
    st.sampled_from([1, 2, 3, 7, 64, 1000, 10**6]),
    st.integers(0, 2**32),
)
def test_any_bits_arrive(dtype: torch.dtype, shape: tuple[int, ...], longest: int, seed: int) -> None:
    """Random bit patterns, NaN of all kinds among them, in runs of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator)
    which = torch.searchsorted(lengths.cumsum(0), torch.arange(count), right=True)  # the run of each number
    drawn = torch.randint(0, 256, (count, dtype.itemsize), generator=generator, dtype=torch.uint8)
    if dtype == torch.bool:
        drawn %= 2
    column = drawn[which].reshape(-1).view(dtype).reshape(shape)
    assert same_bits(sent(column)[0], column)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**33))
@settings(max_examples=200, deadline=None)
def test_integers_at_all_ends_arrive(lowest: int, span: int) -> None:
    highest = min(lowest + span, 2**63 - 1)
    column = torch.tensor([lowest, highest, highest - (highest - lowest) // 3] * 1000).reshape(30, 100)
    assert same_bits(sent(column)[0], column)


def test_nan_payloads_and_negative_zeros_are_told_apart() -> None:
    patterns = torch.tensor([0x7FC00000, 0x7FC00001, -0x00400000, -0x80000000, 0, 0x3F800000])
    column = patterns.to(torch.int32).repeat_interleave(2000).view(torch.float32).reshape(6, 2000)
    got, num_bytes = sent(column)
    assert same_bits(got, column) and num_bytes < 1000


MASK = torch.arange(1024) < torch.randint(1, 1024, (64, 1), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (MASK, 64 * 2 * 5),
        (torch.randn(64, 1) * MASK, 64 * 2 * 8),
        (MASK.long() * 70_000, 64 * 2 * 12),
        (torch.arange(64 * 1024).reshape(64, 1024) % 1000 + 150_000, 64 * 1024 * 4),
        (torch.arange(64 * 1024).reshape(64, 1024) % 1000, 64 * 1024 * 2),
        (torch.arange(64 * 1024).reshape(64, 1024) % 200, 64 * 1024),
    ],
    ids=["mask", "one number a row", "versions", "token ids", "ids below 2^15", "ids below 2^8"],
)
def test_columns_of_a_step_are_small(column: torch.Tensor, wanted: int) -> None:
    got, num_bytes = sent(column)
    assert same_bits(got, column)
    assert num_bytes <= wanted + 1000 < column.nbytes


def test_only_columns_that_gain_take_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small columns and tensors that are no columns, such as weights, are not even looked at."""
    looked_at: list[tuple[int, ...]] = []
    original = transport.compact

    def watched(flat: torch.Tensor, shape: tuple[int, ...]) -> object:
        looked_at.append(shape)
        return original(flat, shape)

    monkeypatch.setattr(transport, "compact", watched)
    constant = torch.zeros(64, 1024)
    assert encode({"weight": constant, "more": [constant]}).nbytes >= constant.nbytes
    assert encode(torch.nn.Parameter(constant)).nbytes >= constant.nbytes
    encode(DataProto.from_dict({"few": torch.zeros(1, SMALL_BYTES // 4 - 1)}))
    assert looked_at == []
    assert sent(constant)[1] < 1000
    assert looked_at == [(64, 1024)]
    noise = torch.randn(64, 1024)
    packet = encode(DataProto.from_dict({"noise": noise}))
    assert packet.buffers[0].ctypes.data == noise.data_ptr(), "it travels without a copy"
