"""Padded rows to packed tokens and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.protocol import BatchError, DataProto, make_rows, pack

TOKENS = st.lists(st.integers(0, 99), min_size=1, max_size=4)


def test_make_rows_pads_prompts_left_and_responses_right() -> None:
    made = make_rows([[1, 2], [5]], [[3, 4, 9], []], 7, prompt_width=3, response_masks=[[1, 0, 1], []])
    assert made["prompts"].tolist() == [[7, 1, 2], [7, 7, 5]]
    assert made["responses"].tolist() == [[3, 4, 9], [7, 7, 7]]
    assert made["input_ids"].tolist() == [[7, 1, 2, 3, 4, 9], [7, 7, 5, 7, 7, 7]]
    assert made["attention_mask"].tolist() == [
        [False, True, True, True, True, True],
        [False, False, True, False, False, False],
    ]
    assert made["response_mask"].tolist() == [[True, False, True], [False, False, False]]


def test_make_rows_refuses_what_does_not_fit() -> None:
    with pytest.raises(BatchError, match="prompt of 3 tokens does not fit into a width of 2"):
        make_rows([[1, 2, 3]], [[1]], 0, prompt_width=2)
    with pytest.raises(BatchError, match="2 prompts, 1 responses"):
        make_rows([[1], [2]], [[1]], 0)
    with pytest.raises(BatchError, match="row 0: 1 response tokens but 2 mask"):
        make_rows([[1]], [[1]], 0, response_masks=[[1, 1]])


def test_pack_a_known_case() -> None:
    packed = pack(DataProto.from_dict(make_rows([[1, 2], [5]], [[3, 4], [6]], 0)))
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 0, 1]
    assert packed.lengths == (4, 2)
    assert packed.prompt_lengths == (2, 1)
    assert packed.shape == (2, 2)
    assert packed.num_tokens == 6
    assert packed.targets.tolist() == [3, 4, 6] and packed.predict_index.tolist() == [1, 2, 4]
    assert packed.unpack(torch.tensor([0.5, 1.5, 2.5]), fill=-1.0).tolist() == [[0.5, 1.5], [2.5, -1.0]]


def test_given_tokens_are_read_and_not_predicted() -> None:
    masks = [[0, 1, 0, 0, 1], [0]]
    packed = pack(
        DataProto.from_dict(make_rows([[1, 2], [5]], [[3, 4, 7, 8, 9], [6]], 0, response_masks=masks))
    )
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 7, 8, 9, 5, 6] and packed.lengths == (7, 2)
    assert packed.prompt_lengths == (2, 1), "the prompt ends where the response begins, sampled or given"
    assert packed.targets.tolist() == [4, 9] and packed.predict_index.tolist() == [2, 5]
    assert packed.unpack(torch.tensor([0.5, 1.5])).tolist() == [[0, 0.5, 0, 0, 1.5], [0, 0, 0, 0, 0]]


def test_unpack_passes_gradients_and_gather_undoes_it() -> None:
    packed = pack(DataProto.from_dict(make_rows([[1], [1]], [[2, 3], [4]], 0)))
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    out = packed.unpack(values)
    (out * torch.tensor([[2.0, 3.0], [5.0, 7.0]])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [2.0, 3.0, 5.0]
    assert torch.equal(packed.gather(out), values)


def test_a_response_without_tokens_and_an_empty_batch() -> None:
    packed = pack(DataProto.from_dict(make_rows([[1, 2]], [[]], 0, response_width=3)))
    assert packed.targets.shape == (0,) and packed.unpack(torch.zeros(0)).tolist() == [[0.0, 0.0, 0.0]]
    empty = pack(DataProto.from_dict(make_rows([[1]], [[2]], 0))[:0])
    assert empty.num_tokens == 0 and empty.lengths == () and empty.shape == (0, 1)


def test_pack_refuses_rows_it_cannot_predict() -> None:
    made = make_rows([[1], [1]], [[2], [3]], 0)
    bad = {**made, "attention_mask": torch.tensor([[True, True], [False, True]])}
    with pytest.raises(BatchError, match="row 1 has no prompt token"):
        pack(DataProto.from_dict(bad))
    bad = {**made, "attention_mask": torch.tensor([[False, False], [True, True]])}
    with pytest.raises(BatchError, match="row 0 has no attended token"):
        pack(DataProto.from_dict(bad))
    bad = {**made, "responses": torch.tensor([[2], [4]])}
    with pytest.raises(BatchError, match="differs from the last columns"):
        pack(DataProto.from_dict(bad))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(TOKENS, st.lists(st.tuples(st.integers(0, 99), st.booleans()), max_size=4)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_padding_changes_nothing_and_every_target_follows_its_predictor(
    pairs: list[tuple[list[int], list[tuple[int, bool]]]], more_left: int, more_right: int
) -> None:
    prompts = [prompt for prompt, _ in pairs]
    responses = [[token for token, _ in response] for _, response in pairs]
    masks = [[sampled for _, sampled in response] for _, response in pairs]
    tight = pack(DataProto.from_dict(make_rows(prompts, responses, 0, response_masks=masks)))
    widths = {"prompt_width": 4 + more_left, "response_width": 4 + more_right}
    wide = pack(DataProto.from_dict(make_rows(prompts, responses, 5, response_masks=masks, **widths)))
    for name in ("input_ids", "position_ids", "predict_index", "targets", "rows", "columns"):
        assert torch.equal(getattr(tight, name), getattr(wide, name)), name
    assert torch.equal(tight.predict_index, tight.predict_index_on_cpu)
    assert tight.lengths == wide.lengths == tuple(len(p) + len(r) for p, r in pairs)
    assert tight.prompt_lengths == wide.prompt_lengths == tuple(map(len, prompts))
    assert tight.input_ids.tolist() == [t for p, r in zip(prompts, responses) for t in p + r]
    assert torch.equal(tight.input_ids[tight.predict_index + 1], tight.targets)
    assert tight.targets.tolist() == [token for _, r in pairs for token, sampled in r if sampled]
