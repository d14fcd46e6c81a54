"""Prompts to requests, outputs to rows: seeds, ids, and every number at its token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from hybridflow.agent.collate import collate
from hybridflow.agent.single_turn import RequestBatch, build_requests
from hybridflow.data.prompts import PromptRow
from hybridflow.models.tiny import create_tiny_tokenizer
from hybridflow.protocol import DataProto
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.trajectory import FINISHED, Lineage, Outcome, Segment, Trajectory
from hybridflow.rollout.base import GenerationOutput, SamplingParams

SAMPLING = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return create_tiny_tokenizer()


def prompt(*tokens: int, **row: Any) -> PromptRow:
    return PromptRow(list(tokens), row, index=0)


PROMPTS = [
    prompt(5, 6, 7, data_source="sums", reward_model={"ground_truth": "4"}, extra_info={"index": 3}),
    prompt(9, data_source="words", reward_model=None),
]


def requests(n: int = 2, step: int = 1, **changes: Any) -> RequestBatch:
    return build_requests(
        PROMPTS, SAMPLING, **{"n": n, "seed": 0, "purpose": "rollout", "step": step, **changes}
    )


def outputs_for(batch: RequestBatch, *token_ids: list[int]) -> list[GenerationOutput]:
    return [
        GenerationOutput(
            request.request_id,
            tokens,
            [-0.5 * (1 + t) for t in range(len(tokens))],
            "stop",
            [4] * len(tokens),
        )
        for request, tokens in zip(batch.requests, token_ids, strict=True)
    ]


def collated(tokenizer: Any, batch: RequestBatch, *token_ids: list[int]) -> DataProto:
    trajectories = [
        batch.trajectory(place, output, tokenizer)
        for place, output in enumerate(outputs_for(batch, *token_ids))
    ]
    return collate(trajectories, tokenizer.pad_token_id)


def test_rows_of_a_prompt_are_neighbours_and_share_a_group() -> None:
    batch = requests(n=3)
    assert [request.prompt_token_ids for request in batch.requests] == [(5, 6, 7)] * 3 + [(9,)] * 3
    assert [row.row["data_source"] for row in batch.rows] == ["sums"] * 3 + ["words"] * 3
    assert [request.request_id for request in batch.requests] == list(range(6))
    assert batch.samples == [0, 1, 2] * 2
    assert len(set(batch.groups)) == 2 and batch.groups[0] == batch.groups[2] != batch.groups[3]
    assert not set(batch.groups) & set(requests(n=3, step=2).groups), "groups of two steps never meet"


def seeds(**changes: Any) -> list[int]:
    return [request.seed for request in requests(**changes).requests]


def test_seeds_differ_by_seed_purpose_step_and_row_and_by_nothing_else() -> None:
    assert seeds() == seeds() and len(set(seeds())) == 4
    for change in ({"step": 2}, {"seed": 1}, {"purpose": "validation"}):
        assert not set(seeds(**change)) & set(seeds())


def test_parts_of_a_batch_have_the_seeds_and_groups_of_the_whole() -> None:
    whole = requests()
    parts = [
        build_requests([p], SAMPLING, n=2, seed=0, purpose="rollout", step=1, first_row=2 * i)
        for i, p in enumerate(PROMPTS)
    ]
    assert [request for part in parts for request in part.requests] == whole.requests
    assert [group for part in parts for group in part.groups] == whole.groups


def test_every_number_stands_at_its_token(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = requests(step=3)
    end = tokenizer.eos_token_id
    answers = [[20, 21, end], [22], [23, 24], [end]]
    rows = collated(tokenizer, batch, *answers)
    pad = tokenizer.pad_token_id
    assert rows.batch["prompts"].tolist() == [[5, 6, 7]] * 2 + [[pad, pad, 9]] * 2
    assert rows.batch["responses"].tolist() == [[20, 21, end], [22, pad, pad], [23, 24, pad], [end, pad, pad]]
    for name in ("response_mask", "loss_mask"):
        assert rows.batch[name].tolist() == [
            [True] * 3,
            [True, False, False],
            [True, True, False],
            [True, False, False],
        ]
    assert rows.batch["response_mask"].data_ptr() != rows.batch["loss_mask"].data_ptr(), (
        "one is narrowed, the other never changes"
    )
    assert rows.batch["rollout_log_probs"].tolist() == [
        [-0.5, -1.0, -1.5],
        [-0.5, 0, 0],
        [-0.5, -1.0, 0],
        [-0.5, 0, 0],
    ]
    assert rows.batch["rollout_log_probs"].dtype == torch.float32
    assert rows.batch["policy_version"].tolist() == [[4] * 3, [4, -1, -1], [4, 4, -1], [4, -1, -1]]
    columns = {name: list(column) for name, column in rows.non_tensor_batch.items()}
    assert columns["solution_str"] == [
        tokenizer.decode([20, 21]),
        tokenizer.decode([22]),
        tokenizer.decode([23, 24]),
        "",
    ]
    assert columns["uid"] == ["3-0", "3-0", "3-1", "3-1"] and columns["finish_reason"] == ["stop"] * 4
    assert "token_level_scores" not in rows, "nothing is scored"
    assert columns["data_source"] == ["sums", "sums", "words", "words"]
    assert (
        columns["ground_truth"] == ["4", "4", None, None]
        and columns["extra_info"] == [{"index": 3}] * 2 + [{}] * 2
    )


def test_row_ids_are_unique_in_a_run_and_ascend(tokenizer: PreTrainedTokenizerFast) -> None:
    ids: list[int] = []
    for step in (0, 1, 2, 10**6):
        rows = collated(tokenizer, requests(step=step), *[[5]] * 4)
        ids += rows.batch["row_id"].tolist()
        assert len(set(rows.batch["trajectory_id"].tolist())) == 4
    assert ids == sorted(ids) and len(set(ids)) == 16 and max(ids) < 2**63


def test_an_empty_response_is_a_row_without_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = collated(tokenizer, requests(), [], [5], [6, 7], [])
    assert (
        rows.batch["response_mask"].sum(-1).tolist() == [0, 1, 2, 0]
        and rows.non_tensor_batch["solution_str"][0] == ""
    )


def test_given_tokens_are_read_and_never_sampled() -> None:
    """Two rows of one trajectory: sampled, given and sampled tokens; and a row of its own."""
    first = Lineage(
        Prompt((1, 2)),
        (Segment((3, 4), True, (-0.5, -1.5), (7, 7)), Segment((8, 9)), Segment((5,), True, (-2.5,), (8,))),
    )
    second = Lineage(Prompt((6,)), (Segment((3,), True, (-0.25,), (8,)),))
    trajectory = Trajectory(3, 1, (first, second), FINISHED, reward=2.0, extra={"source": "x"})
    other = Trajectory(4, 0, (Lineage(Prompt((6,)), (Segment((3,), True, (-1.0,), (8,)),)),), reward=-1.0)
    rows = collate([trajectory, other], 0)
    assert rows.batch["responses"].tolist() == [[3, 4, 8, 9, 5], [3, 0, 0, 0, 0], [3, 0, 0, 0, 0]]
    assert rows.batch["response_mask"].int().tolist() == [[1, 1, 0, 0, 1], [1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert rows.batch["attention_mask"].sum(-1).tolist() == [7, 2, 2]
    assert rows.batch["rollout_log_probs"].tolist() == [
        [-0.5, -1.5, 0, 0, -2.5],
        [-0.25, *[0] * 4],
        [-1, *[0] * 4],
    ]
    assert rows.batch["policy_version"].tolist() == [[7, 7, -1, -1, 8], [8, *[-1] * 4], [8, *[-1] * 4]]
    assert rows.batch["token_level_scores"].tolist() == [[0] * 5, [2, *[0] * 4], [-1, *[0] * 4]]
    ids = rows.batch["trajectory_id"].tolist()
    assert ids[0] == ids[1] < ids[2] and rows.batch["lineage"].tolist() == [0, 1, 0]
    assert list(rows.non_tensor_batch["source"]) == ["x", "x", None]


def test_rewards_of_turns_stand_on_the_last_token_of_their_calls() -> None:
    """Calls 0 and 2 are in the first row, call 1 is in a row of its own."""
    first = Lineage(
        Prompt((1, 2)),
        (
            Segment((3, 4), True, (-0.5, -1.5), (7, 7), 0),
            Segment((8, 9)),
            Segment((5, 6), True, (-2.5, -1.0), (8, 8), 2),
        ),
    )
    second = Lineage(Prompt((6,)), (Segment((3, 4), True, (-0.25, -1.0), (8, 8), 1),))
    rewards = {0: 0.5, 1: -0.25, 2: 2.0}
    whole = Trajectory(3, 1, (first, second), FINISHED, reward=3.25, turn_rewards=rewards)
    part = Trajectory(4, 0, (second,), FINISHED, reward=1.0, turn_rewards={1: 0.25})
    scores = collate([whole, part], 0).batch["token_level_scores"]
    assert scores.tolist() == [
        [0, 0.5, 0, 0, 0, 3.0],  # the rest of the reward, 1, is at the end with that of the last call
        [0, -0.25, *[0] * 4],
        [0, 1.0, *[0] * 4],
    ]


def test_how_a_trajectory_ended(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = requests()
    outputs = [
        GenerationOutput(0, [5], [-1.0], "length", [4]),
        GenerationOutput(1, [5], [-1.0], "abort", [4]),
        GenerationOutput(2, [], [], "error", [], error="prompt of 900 tokens", refused=True),
        GenerationOutput(3, [], [], "error", [], error="the server is gone"),
    ]
    made = [batch.trajectory(place, output, tokenizer) for place, output in enumerate(outputs)]
    assert [one.outcome for one in made] == [
        Outcome("truncated"),
        Outcome("failed", "cancelled", "request 1 was aborted"),
        Outcome("failed", "data", "request 2: prompt of 900 tokens"),
        Outcome("failed", "infrastructure", "request 3: the server is gone"),
    ]
    assert list(collate(made[:1], 0).non_tensor_batch["finish_reason"]) == ["length"]
    with pytest.raises(AssertionError, match="a failed trajectory is never a row"):
        collate(made, 0)
