from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hybridflow.controller.ray.transport import SMALL_BYTES, decode, encode
from hybridflow.observability.metrics import Metrics
from hybridflow.protocol import DataProto

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (100, 7, 16)], ids=str)
def test_tensors_of_all_kinds(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sent = (torch.randn(shape) * 3).to(dtype)
    got = decode(encode(sent))
    assert got.dtype == dtype and got.shape == sent.shape
    assert got.reshape(-1).view(torch.uint8).tolist() == sent.reshape(-1).view(torch.uint8).tolist()


def test_views_travel_without_what_they_are_views_of() -> None:
    whole = torch.randn(1000, 512)
    for view in (whole[10:20], whole[:, 5], whole.t()[:8], whole[::100]):
        packet = encode(view)
        assert packet.nbytes < view.numel() * 4 + 1000
        assert torch.equal(decode(packet), view)
    conjugate = torch.randn(3, 2000, dtype=torch.complex64).conj()
    assert torch.equal(decode(encode(conjugate)), conjugate.resolve_conj())


def test_no_copy_on_either_side() -> None:
    batch = DataProto.from_dict({"x": torch.randn(64, 512)})
    packet = encode(batch)
    (buffer,) = packet.buffers
    assert buffer.ctypes.data == batch.batch["x"].data_ptr()
    assert decode(packet).batch["x"].data_ptr() == buffer.ctypes.data


def test_small_buffers_stay_inside() -> None:
    assert encode(torch.zeros(SMALL_BYTES // 4 - 1)).buffers == ()
    assert len(encode(torch.zeros(SMALL_BYTES // 4)).buffers) == 1


def test_gradients_and_parameters_stay_home() -> None:
    parameter = torch.nn.Parameter(torch.randn(40, 40))
    got = decode(encode([parameter, parameter * 2]))
    assert [type(tensor) for tensor in got] == [torch.Tensor, torch.Tensor]
    assert not got[0].requires_grad and torch.equal(got[1], parameter.detach() * 2)


@dataclass
class Sample:
    tokens: torch.Tensor
    extra: dict[str, Any]


def test_structures_of_all_kinds() -> None:
    metrics = Metrics()
    metrics.add_mean("loss", torch.tensor(6.0), 3)
    shared = torch.randn(50, 50)
    sent = {
        "sample": Sample(
            torch.arange(2000), {"image": np.arange(5000.0).reshape(50, 100), "words": ["a", None]}
        ),
        "batch": DataProto.from_dict(
            {"x": torch.ones(3, 2000)}, {"uid": ["a", "b", "c"], "l": [[1], [], {"t": shared}]}, {"step": 3}
        ),
        "nested": [(shared, shared), {"deep": [shared]}],
        "metrics": metrics,
        "call": lambda value: value + 1,
    }
    got = decode(encode(sent))
    assert torch.equal(got["sample"].tokens, torch.arange(2000)) and got["sample"].extra["words"] == [
        "a",
        None,
    ]
    assert np.array_equal(got["sample"].extra["image"], sent["sample"].extra["image"])  # type: ignore[attr-defined]
    assert got["batch"].meta_info == {"step": 3} and list(got["batch"].non_tensor_batch["uid"]) == [
        "a",
        "b",
        "c",
    ]
    assert torch.equal(got["batch"].non_tensor_batch["l"][2]["t"], shared) and got["batch"].batch[
        "x"
    ].shape == (3, 2000)
    assert got["nested"][0][0] is got["nested"][0][1] is got["nested"][1]["deep"][0]
    assert got["metrics"].to_floats() == {"loss": 2.0} and got["call"](1) == 2


def test_ranks_keep_their_own_part_of_a_sharded_tensor() -> None:
    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return torch.Tensor(self)

    with pytest.raises(AssertionError, match="cannot leave its ranks"):
        encode({"weight": torch.zeros(3).as_subclass(Sharded)})
