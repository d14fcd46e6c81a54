"""The field table says what the batch holds, and the code makes what it says."""

from __future__ import annotations

import pytest
import torch

from hybridflow.protocol import FIELDS, BatchError, DataProto, field, make_rows

AGREED = {
    ("B,P", "int64"): {"prompts"},
    ("B,R", "int64"): {"responses"},
    ("B,T", "int64"): {"input_ids"},
    ("B,T", "bool"): {"attention_mask"},
    ("B,T", "int16"): {"routed_experts"},
    ("B,R", "bool"): {"response_mask", "loss_mask"},
    ("B,R", "int32"): {"policy_version", "call"},
    ("B", "int64"): {"trajectory_id", "trajectory_rows", "lineage", "row_id", "group_ids", "preference"},
    ("B", "float32"): {
        "rm_scores",
        "reward_baselines",
        "ref_log_prob_sum",
        "margin",
        "reference_point",
        "source_weight",
        "source_kl_coef",
    },
    ("B", "float64"): {"repetition"},
    ("B", "bool"): {"positive", "is_demonstration"},
    ("B,K", "float32"): {"reward_components"},
    ("B", "object"): {
        *("uid", "finish_reason", "data_source", "reward_model", "extra_info"),
        *("solution_str", "overlong_reward", "media"),
    },
    ("B,R", "float32"): {
        *("rollout_log_probs", "token_level_scores", "token_level_rewards", "old_log_probs", "ref_log_prob"),
        *("values", "advantages", "returns", "rollout_is_weights", "entropys"),
        *("sum_pi_squared", "teacher_log_probs", "teacher_top_outcomes", "process_rewards", "step_labels"),
    },
}


def test_the_table_is_the_one_agreed_on() -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for name, line in FIELDS.items():
        assert name == line.name and line.writers and line.readers and line.meaning
        found.setdefault((line.axes, line.dtype), set()).add(name)
    assert found == AGREED


def test_dtypes_exist_in_torch() -> None:
    assert all(
        line.dtype == "object" or isinstance(getattr(torch, line.dtype), torch.dtype)
        for line in FIELDS.values()
    )


def test_rows_as_made_agree_with_the_table() -> None:
    data = DataProto.from_dict(make_rows([[1, 2, 3], [4]], [[5, 6], [7]], 0)).fresh_row_ids()
    data.narrow_loss_mask(data.batch["response_mask"])
    sizes = {"B": 2, "P": 3, "R": 2, "T": 5}
    assert set(data.batch.keys()) == {
        "prompts",
        "responses",
        "input_ids",
        "attention_mask",
        "response_mask",
        "loss_mask",
        "row_id",
    }
    for name, tensor in data.batch.items():
        assert tuple(tensor.shape) == tuple(sizes[axis] for axis in field(name).axes.split(",")), name
        assert tensor.dtype == getattr(torch, field(name).dtype), name


def test_lookup() -> None:
    assert field("old_log_probs").unit == "nats"
    with pytest.raises(BatchError, match="no field 'nope'"):
        field("nope")
