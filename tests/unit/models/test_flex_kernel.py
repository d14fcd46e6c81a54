"""FlexAttention over packed rows against plain attention of each row alone."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from hybridflow.distributed.accelerators import features
from hybridflow.models.attention import flex_kernel as flex
from hybridflow.models.attention import kernels
from hybridflow.models.attention import layouts as attending
from hybridflow.models.attention.layouts import PackedLayout, attend_allowed
from hybridflow.models.attention.scores import Scores, causal_mask, masked_attention

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
LENGTHS = [150, 3, 200, 128, 1]
HEADS = 4
SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)
KINDS = {
    "cap": Scores(softcap=0.9),
    "sinks": Scores(sinks=SINKS, scaling=0.4),
    "window": Scores(sliding_window=40),
    "all": Scores(sliding_window=130, softcap=2.0, sinks=SINKS),
}


def states(tokens: int = sum(LENGTHS), dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    shapes = ((HEADS, 16), (2, 16), (2, 16))
    return [torch.randn(1, *(n, tokens, d), generator=draw, dtype=torch.float64).to(dtype) for n, d in shapes]


def alone(given: list[Tensor], how: Scores, lengths: list[int] = LENGTHS) -> Tensor:
    """Each row by plain attention, one after the other: [1, H, N, D]."""
    done = []
    for query, key, value in zip(*(x.split(lengths, dim=2) for x in given), strict=True):
        allowed = causal_mask(query.shape[2], how.window(query.shape[2]), torch.device("cpu"))
        done.append(masked_attention(query, key, value, allowed, how))
    return torch.cat(done, dim=2)


class Extra(NamedTuple):
    lse: Tensor


def twin(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Any:
    """flex_attention in plain operations, for gradients, which torch's own has on no CPU."""
    assert how["enable_gqa"]
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * (how["scale"] or query.shape[-1] ** -0.5)
    places = torch.arange(query.shape[2])
    if how["score_mod"] is not None:
        scores = how["score_mod"](scores, None, None, None, None)
    allowed = how["block_mask"].mask_mod(None, None, places[:, None], places[None])
    scores = scores.masked_fill(~allowed, float("-inf"))
    attended = scores.softmax(-1) @ value
    if "return_aux" not in how:
        return attended
    return attended, Extra(scores.logsumexp(-1))


@pytest.mark.parametrize("window", [None, 1, 40, 128, 129, 300])
@pytest.mark.parametrize("lengths", [LENGTHS, [512], [1] * 130, [127, 257]])
def test_blocks_that_are_seen(lengths: list[int], window: int | None) -> None:
    """Against torch's own blocks, which it finds by asking about every pair of tokens."""
    rows = flex.FlexRows(lengths, "cpu")
    found = flex.block_mask(rows._row_of, window)
    wanted = create_block_mask(found.mask_mod, None, None, rows.size, rows.size, device="cpu")
    assert torch.equal(found.to_dense(), wanted.to_dense())
    for mine, theirs in (
        (found.kv_num_blocks, wanted.kv_num_blocks),
        (found.full_kv_num_blocks, wanted.full_kv_num_blocks),
    ):
        assert torch.equal(mine, theirs), "as many blocks in part, and as many whole"


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_torchs_kernel_gives_what_each_row_has_alone(how: Scores) -> None:
    given = states(dtype=torch.float32)
    if how.sinks is not None:
        how = dataclasses.replace(how, sinks=how.sinks.float())
    found = flex.FlexRows(LENGTHS, "cpu").attend(given[0], given[1], given[2], how)
    torch.testing.assert_close(found, alone(given, how), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_gradients_pass_through_padding_caps_and_sinks(how: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_kernel", lambda _: twin)
    given = [state.requires_grad_() for state in states()]
    if how.sinks is not None:
        how = dataclasses.replace(how, sinks=SINKS.clone().requires_grad_())
        given.append(how.sinks)
    found = flex.FlexRows(LENGTHS, "cpu").attend(given[0], given[1], given[2], how)
    wanted = alone(given[:3], how)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), given),
        torch.autograd.grad((wanted * weights).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_sizes_are_few_and_waste_little() -> None:
    sizes = {flex.padded_size(tokens) for tokens in range(1, 32_769)}
    assert len(sizes) == 8 + 5 * 8, "up to 1,024 tokens by 128, then eight for each of five octaves"
    assert len(sizes) <= flex._MOST_SIZES
    for tokens in range(1, 32_769):
        size = flex.padded_size(tokens)
        assert tokens <= size <= max(tokens + 127, tokens * 9 / 8) and size % flex.BLOCK == 0


def test_a_layer_is_tried_once_and_the_log_says_why_it_does_without(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flex._works.cache_clear()
    given = states(8, torch.float32)
    with caplog.at_level(logging.WARNING):
        assert not flex.flex_works(*given, Scores(softcap=1.0)), "torch has no backward pass on a CPU"
        assert "NotImplementedError" in caplog.text
        monkeypatch.setattr(flex, "_kernel", lambda _: twin)
        assert not flex.flex_works(*given, Scores(softcap=1.0)), "it is not tried again"
        caplog.clear()
        for how in KINDS.values():
            assert flex.flex_works(*given, how)
        assert not caplog.text

        def no_window(*args: Any, **how: Any) -> Any:
            whole = flex.block_mask(torch.zeros(256, dtype=torch.int64), None)
            return twin(*args, **{**how, "block_mask": whole})

        monkeypatch.setattr(flex, "_kernel", lambda _: no_window)
        assert not flex.flex_works(*given, Scores(softcap=3.0, sliding_window=2))
    assert "from plain attention" in caplog.text
    flex._works.cache_clear()


@pytest.fixture
def flex_on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """All tensors count as being on CUDA, where flex works and varlen does not; returns the rows it had."""
    asked: list[int] = []

    class Rows(flex.FlexRows):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, how: Scores) -> Tensor:
            asked.append(self.num_tokens)
            return super().attend(query, key, value, how)

    monkeypatch.setattr(kernels, "features", lambda _: features("cuda"))
    monkeypatch.setattr(kernels, "_varlen_works", lambda *_: False)
    monkeypatch.setattr(kernels, "flex_works", lambda *_: True)
    monkeypatch.setattr(flex, "_kernel", lambda _: twin)
    monkeypatch.setattr(attending, "FlexRows", Rows)
    return asked


@pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
def test_packed_rows_take_it_on_cuda(how: Scores, flex_on_cuda: list[int]) -> None:
    given = states()
    found = PackedLayout.build(LENGTHS).attend(given[0], given[1], given[2], how)
    assert flex_on_cuda == [sum(LENGTHS)]
    torch.testing.assert_close(found.transpose(1, 2), alone(given, how), atol=1e-10, rtol=1e-10)


def test_packed_rows_do_without_it_where_another_kernel_serves(flex_on_cuda: list[int]) -> None:
    given = states()
    layout = PackedLayout.build(LENGTHS)
    layout.attend(given[0], given[1], given[2], Scores())
    layout.attend(given[0], given[1], given[2], Scores(sliding_window=max(LENGTHS)))
    shared = PackedLayout.build([3, 3], places=torch.tensor([0, 1, 2, 0, 1, 3]))
    few = [x[:, :, :4] for x in given]
    shared.attend(few[0], few[1], few[2], Scores(softcap=1.0))
    assert flex_on_cuda == [], "plain rows, a window that hides nothing, rows that share tokens"


def test_many_written_out_scores_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [state.requires_grad_() for state in states(50)]
    allowed = causal_mask(50, 20, torch.device("cpu"))
    most: list[int] = []

    def seen(query: Tensor, key: Tensor, *args: Any) -> Tensor:
        most.append(query.shape[1] * query.shape[2] * key.shape[2])
        return masked_attention(query, key, *args)

    monkeypatch.setattr(attending, "masked_attention", seen)
    monkeypatch.setattr(attending, "MOST_SCORES", 3_000)
    for mask in (allowed, allowed[None]):
        found = attend_allowed(given[0], given[1], given[2], mask, KINDS["all"])
        wanted = masked_attention(given[0], given[1], given[2], allowed, KINDS["all"])
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
        for mine, theirs in zip(
            torch.autograd.grad(found.square().sum(), given),
            torch.autograd.grad(wanted.square().sum(), given),
            strict=True,
        ):
            torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)
    assert len(most) == 2 * 2 * 4 and max(most) <= 3_000, "each of four parts twice: forward and backward"
