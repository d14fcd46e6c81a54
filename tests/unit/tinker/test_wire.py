"""Messages by number of field: what is read, what is written, and bodies that are none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridflow.rollout.base import GenerationOutput
from hybridflow.tinker.wire import (
    MAX_CELLS,
    MAX_INPUTS,
    MAX_NUMBERS,
    WireError,
    bytes_field,
    double_field,
    number_field,
    read_fields,
    read_forward_backward,
    read_numbers,
    write_outputs,
    write_samples,
)
from plain_tinker import floats, read_outputs, read_sequence, request_message, row_message, tensor_message

ROWS = [
    ([1, 2, 300], {"target_tokens": [2, 300, 4], "weights": [0.0, 1.0, 0.5]}),
    ([7], {"weights": [[1.0, 2.0]]}),
]


def test_a_request_is_read_as_it_was_written() -> None:
    body = request_message("s:train:0", 300, ROWS, "ppo", {"clip_low_threshold": 0.75}, True)
    text = bytes_field(7, bytes_field(1, "loss_id") + bytes_field(2, bytes_field(2, "x")))
    number = bytes_field(7, bytes_field(1, "beta") + bytes_field(2, double_field(1, 0.5)))
    found = read_forward_backward(body + text + number)
    assert (found.model_id, found.seq_id, found.loss_fn, found.forward_only) == (
        "s:train:0",
        300,
        "ppo",
        True,
    )
    assert found.loss_fn_config == {"clip_low_threshold": 0.75, "loss_id": "x", "beta": 0.5}
    first, second = found.data
    assert first.tokens.tolist() == [1, 2, 300] and first.tokens.dtype == torch.int64
    assert first.inputs["target_tokens"].tolist() == [2, 300, 4]
    assert first.inputs["weights"].dtype == torch.float32 and second.inputs["weights"].shape == (1, 2)


def test_chunks_of_a_prompt_are_one_row_and_zeros_need_not_be_sent() -> None:
    chunk = bytes_field(1, bytes_field(1, bytes_field(1, np.array([8, 9], "<i4").tobytes())))
    sparse = bytes_field(1, np.array([5.0], "<f4").tobytes())
    sparse += bytes_field(2, np.array([0, 0, 1], "<i8").tobytes()) + bytes_field(
        3, np.array([2], "<i8").tobytes()
    )
    tensor = bytes_field(2, sparse) + number_field(3, 1) + bytes_field(4, bytes([2, 3]))  # packed sizes
    assert tensor == sparse_message([5.0], [0, 0, 1], [2], [2, 3])
    (row,) = read_forward_backward(bytes_field(3, chunk + row_message([7], {"weights": tensor}))).data
    assert row.tokens.tolist() == [8, 9, 7]
    assert row.inputs["weights"].tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 5.0]]


def sparse_message(values: list[float], starts: list[int], columns: list[int], shape: list[int]) -> bytes:
    """A tensor of float32 whose zeros are not sent."""
    sizes = b"".join(number_field(4, size)[1:] for size in shape)
    sparse = bytes_field(1, np.array(values, "<f4").tobytes())
    sparse += bytes_field(2, np.array(starts, "<i8").tobytes())
    sparse += bytes_field(3, np.array(columns, "<i8").tobytes())
    return bytes_field(2, sparse) + number_field(3, 1) + bytes_field(4, sizes)


def body_of(tensor: bytes, count: int = 1) -> bytes:
    return bytes_field(3, row_message([1], {f"w{place}": tensor for place in range(count)}))


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (sparse_message([5.0], [0, 3], [0, 1, 2], [1, 3]), "w0 is sparse with 1 values at 3 columns"),
        (sparse_message([5.0, 6.0], [0, 2], [1, 1], [1, 3]), "no column twice in a row"),
        (sparse_message([5.0], [], [0], [1, 3]), "row pointers"),
        (sparse_message([], [], [], [0, 3]), "row pointers"),
        (sparse_message([], [0], [], [0, 2**66]), "w0 has 2 sizes"),
        (sparse_message([], [0, 0], [], [1, MAX_NUMBERS + 1]), f"at most {MAX_NUMBERS} numbers in a row"),
        (sparse_message([], [0], [], [0]), "two sizes are wanted"),
        (tensor_message([]) + number_field(4, 2**64), "w0 has 2 sizes"),
        (tensor_message([[[1.0]]]), "w0 has 3 sizes"),
        (tensor_message(np.zeros(MAX_NUMBERS + 1)), f"at most {MAX_NUMBERS} numbers in a row"),
    ],
)
def test_a_tensor_that_is_none_says_why(tensor: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told):
        read_forward_backward(body_of(tensor))


def test_a_small_body_takes_little_memory() -> None:
    row = body_of(sparse_message([1.0], [0, 1], [7], [1, MAX_NUMBERS]))
    assert read_forward_backward(row).data[0].inputs["w0"].shape == (1, MAX_NUMBERS)
    with pytest.raises(WireError, match="send them in several requests"):
        read_forward_backward(row * (MAX_CELLS // MAX_NUMBERS + 1))
    with pytest.raises(WireError, match=f"wanted at most {MAX_INPUTS}"):
        read_forward_backward(body_of(tensor_message([1.0]), MAX_INPUTS + 1))


def test_a_number_is_read_whatever_the_rest_is() -> None:
    assert read_numbers(request_message("m", 7, [], "", {}, False) + number_field(3, 1)) == ("m", 7)
    for seq in (0, 2**66):
        with pytest.raises(WireError, match=f"seq_id={seq}: wanted a number from 1"):
            read_numbers(request_message("m", seq, [], "", {}, False))
    with pytest.raises(WireError, match="utf-8"):
        read_numbers(bytes_field(1, b"\xff") + number_field(2, 1))


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"\x1a\xff", "inside of a number"),
        (b"\x1a\x05abc", "5 bytes begins 3 bytes before the end"),
        (b"\x0b", "wire type 3"),
        (b"\xff" * 11, "more than ten bytes"),
        (bytes_field(1, b"\xff"), "utf-8"),
        (number_field(3, 1), "a message is wanted"),
        (bytes_field(2, b"x"), "a number is wanted"),
        (bytes_field(3, bytes_field(1, bytes_field(2, b""))), "only encoded text is served"),
        (bytes_field(3, row_message([1], {"w": number_field(3, 9)})), "a tensor of the type 9"),
        (bytes_field(3, row_message([1], {"w": tensor_message([1.0]) + number_field(4, 3)})), "shape"),
        (
            bytes_field(
                3,
                row_message(
                    [1], {"w": bytes_field(2, b"") + number_field(3, 1) + 2 * number_field(4, 2**40)}
                ),
            ),
            "at most",
        ),
        (bytes_field(5, bytes_field(1, "a") + bytes_field(2, b"1234")), "a double of 4 bytes"),
    ],
)
def test_a_body_that_is_none_says_why(body: bytes, told: str) -> None:
    with pytest.raises(WireError, match=told):
        read_forward_backward(body)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_any_bytes_are_a_request_or_refused(noise: bytes, place: int) -> None:
    whole = request_message("m", 1, ROWS, "ppo", {"beta": 1.0}, False)
    for body in (noise, whole[:place] + noise + whole[place:], whole[:place]):
        try:
            read_forward_backward(body)
        except WireError:
            continue


def test_outputs_have_the_shapes_of_the_targets() -> None:
    rows = [torch.tensor([-1.0, -2.0]), torch.tensor([[-0.5, -0.25, -4.0]])]
    found, loss = read_outputs(read_fields(write_outputs(rows, {"loss:sum": 1.5})))
    assert loss == 1.5 and all(torch.equal(one, other) for one, other in zip(found, rows, strict=True))


def test_samples_have_log_probs_and_the_most_probable_tokens() -> None:
    tops = [[(4, -0.5), (9, -1.0), (1, -3.0)], [(5, -0.25), (8, -2.0), (1, -3.0)]]
    stopped = GenerationOutput(0, [4, 5], [-0.5, -0.25], "stop", [0, 0], top_log_probs=tops)
    cut = GenerationOutput(1, [6], [-1.5], "length", [0])
    message = read_fields(write_samples([stopped, cut], torch.tensor([float("nan"), -1.0]), 2))
    first = read_fields(message[1][0])  # type: ignore[arg-type]
    assert read_sequence(message[1][0])[0] == [4, 5] and first[1] == [0]
    assert read_fields(message[1][1])[1] == [1]  # type: ignore[arg-type]
    assert floats(message[2][0]).isnan().tolist() == [True, False]
    top = read_fields(first[4][0])  # type: ignore[arg-type]
    assert np.frombuffer(top[1][0], "<i4").tolist() == [4, 9, 5, 8] and (top[3], top[4]) == ([2], [2])  # type: ignore[arg-type]
    assert 2 not in read_fields(write_samples([cut], None))
