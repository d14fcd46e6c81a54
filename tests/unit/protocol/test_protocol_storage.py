"""A batch on disk: what goes in comes out, and what cannot be held is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.errors import DataError
from hybridflow.protocol import BatchError, DataProto


def test_round_trip(tmp_path: Path) -> None:
    shared = torch.randn(4, 3)
    data = DataProto.from_dict(
        {
            "a": shared[::2],
            "b": shared[1::2].t()[:2],
            "view": shared[:2],
            "same": shared[:2],
            "mask": torch.tensor([True, False]),
            "half": torch.ones(2, dtype=torch.bfloat16),
        },
        {
            "uid": ["é", "b"],
            "n": np.array([1, 2]),
            "mixed": [None, {"k": [1.5, True]}],
            "array": [np.arange(2), np.float32(0.5)],
        },
        {"step": np.int64(3), "nested": {"x": (1, 2)}, "nan": float("nan")},
    )
    data.save_to_disk(tmp_path / "new" / "folder")
    assert sorted(p.name for p in (tmp_path / "new" / "folder").iterdir()) == [
        "meta.json",
        "tensors.safetensors",
    ]
    back = DataProto.load_from_disk(tmp_path / "new" / "folder")
    for name, tensor in data.batch.items():
        assert torch.equal(back.batch[name], tensor) and back.batch[name].dtype == tensor.dtype
    assert back.non_tensor_batch["uid"].tolist() == ["é", "b"]
    assert back.non_tensor_batch["n"].tolist() == [
        1,
        2,
    ]
    assert back.non_tensor_batch["mixed"].tolist() == [None, {"k": [1.5, True]}]
    assert back.non_tensor_batch["array"].tolist() == [[0, 1], 0.5]
    assert back.meta_info["step"] == 3
    assert back.meta_info["nested"] == {"x": [1, 2]}
    assert np.isnan(back.meta_info["nan"])


@pytest.mark.parametrize(
    "data",
    [DataProto(), DataProto.from_dict({}, {"uid": ["a"]}), DataProto.from_dict({"x": torch.zeros(0, 4)})],
)
def test_empty_batches_survive(tmp_path: Path, data: DataProto) -> None:
    data.save_to_disk(tmp_path)
    back = DataProto.load_from_disk(tmp_path)
    assert len(back) == len(data) and set(back.batch.keys()) == set(data.batch.keys())


@pytest.mark.parametrize("value", [{1, 2}, b"bytes", object(), {3: "key"}, [torch.zeros(1)]])
def test_a_value_json_cannot_hold_names_its_column_and_writes_nothing(tmp_path: Path, value: object) -> None:
    with pytest.raises(BatchError, match="'odd'"):
        DataProto.from_dict({}, {"fine": [1], "odd": [value]}).save_to_disk(tmp_path / "x")
    with pytest.raises(BatchError, match=r"meta_info\['odd'\]"):
        DataProto.from_dict({"t": torch.zeros(1)}, {}, {"odd": value}).save_to_disk(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_missing_or_damaged_folder_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="missing"):
        DataProto.load_from_disk(tmp_path / "nowhere")
    DataProto.from_dict({"x": torch.zeros(8)}).save_to_disk(tmp_path)
    whole = (tmp_path / "tensors.safetensors").read_bytes()
    (tmp_path / "tensors.safetensors").write_bytes(whole[:-5])
    with pytest.raises(DataError, match="damaged"):
        DataProto.load_from_disk(tmp_path)
    (tmp_path / "tensors.safetensors").write_bytes(whole)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        DataProto.load_from_disk(tmp_path)
