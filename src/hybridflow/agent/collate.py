"""Trajectories to a DataProto, with the new columns `response_mask`, `uid`, `row_id` and the rollout's
log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hybridflow.agent.single_turn import RequestBatch
from hybridflow.data.tokenizer import Tokenizer
from hybridflow.errors import RolloutError
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows
from hybridflow.rollout.base import GenerationOutput

ROWS_PER_STEP = 1 << 32
"""Row ids are step · ROWS_PER_STEP + row, which is unique in a run."""


def collate(
    batch: RequestBatch, outputs: Sequence[GenerationOutput], tokenizer: Tokenizer, *, step: int
) -> DataProto:
    """Make a DataProto with one row for each request, in their order.

    Tensors: prompts, responses, input_ids, attention_mask, response_mask, loss_mask, rollout_log_probs [B, R]
    float32 nats, policy_version [B, R] int32, row_id [B]. Object columns: uid, finish_reason, solution_str
    and the prompt row's own fields. RolloutError where a request failed.
    """
    failed = [output for output in outputs if output.finish_reason == "error"]
    if failed:
        raise RolloutError(
            f"{len(failed)} of {len(outputs)} requests failed; the first, row {failed[0].request_id}: "
            f"{failed[0].error}"
        )
    responses = [output.token_ids for output in outputs]
    pad = tokenizer.pad_token_id
    assert pad is not None, "the tokenizer loader sets a pad token"
    tensors = make_rows([request.prompt_token_ids for request in batch.requests], responses, int(pad))
    count, width = tensors["responses"].shape
    log_probs = torch.zeros(count, width)
    versions = torch.full((count, width), -1, dtype=torch.int32)
    for row, output in enumerate(outputs):
        size = len(output.token_ids)
        log_probs[row, :size] = torch.tensor(output.log_probs)
        versions[row, :size] = torch.tensor(output.policy_versions, dtype=torch.int32)
    tensors |= {
        "loss_mask": tensors["response_mask"].clone(),
        "rollout_log_probs": log_probs,
        "policy_version": versions,
        "row_id": torch.tensor([request.request_id for request in batch.requests]) + step * ROWS_PER_STEP,
    }
    texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
    columns = {
        "uid": batch.uids,
        "finish_reason": [output.finish_reason for output in outputs],
        "solution_str": texts,
        "data_source": [row.row.get("data_source") for row in batch.rows],
        "ground_truth": [(row.row.get("reward_model") or {}).get("ground_truth") for row in batch.rows],
        "extra_info": [row.row.get("extra_info") or {} for row in batch.rows],
    }
    return DataProto.from_dict(tensors, columns)
