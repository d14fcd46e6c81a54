"""Which kernel attention has on which device, and what each gives, against plain attention in float64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from zoo import tiny_hf

from hybridflow.distributed.accelerators import features
from hybridflow.models.attention import kernels
from hybridflow.models.attention import layouts as attending
from hybridflow.models.attention.layouts import PackedLayout, attend_allowed
from hybridflow.models.attention.scores import Scores, masked_attention
from hybridflow.models.files.probe import probe_policy
from hybridflow.models.policy import PolicyModel

HALF = torch.bfloat16


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All tensors count as being on CUDA; returns the kernels that work there, varlen at first.

    FlexAttention, which torch can train with on CUDA only, is not among them: test_flex_kernel.py has it.
    """
    working = ["varlen"]
    monkeypatch.setattr(kernels, "features", lambda _: features("cuda"))
    monkeypatch.setattr(kernels, "_varlen_works", lambda *_: "varlen" in working)
    monkeypatch.setattr(kernels, "flex_works", lambda *_: "flex" in working)
    return working


def states(
    length: int = 40, heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (16, 16), **how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    query, key, value = (
        torch.randn(2, count, length, dim, generator=draw, dtype=torch.float64).to(**how)
        for count, dim in shapes
    )
    return query, key, value


def chosen(over: kernels.Over, *, plain: bool = True, dtype: torch.dtype = HALF, **how: Any) -> str:
    scores = Scores(softcap=None if plain else 1.0)
    return kernels.choose_kernel(*states(4, dtype=dtype, **how), over, scores)


def test_the_kernel_by_device(on_cuda: list[str]) -> None:
    assert chosen("causal") == "sdpa" and chosen("causal", dtype=torch.float32) == "expanded"
    assert chosen("causal", dtype=torch.float32, heads=(2, 2)) == "sdpa"
    assert chosen("causal", dims=(16, 24)) == "expanded", "flash wants heads of one size"
    assert chosen("packed") == "varlen" and chosen("packed", dtype=torch.float32) == "expanded"
    assert chosen("window") == "varlen" and chosen("window", dtype=torch.float32) == "expanded"
    assert chosen("window", dims=(12, 12)) == chosen("window", dims=(264, 264)) == "expanded"
    assert chosen("mask") == "expanded" and chosen("mask", heads=(2, 2)) == "sdpa"
    on_cuda.clear()
    assert chosen("window") == "expanded" and chosen("window", heads=(2, 2)) == "sdpa"
    for over in ("causal", "window", "mask"):
        assert chosen(over, plain=False) == "written out"  # type: ignore[arg-type]
    on_cuda.append("flex")
    assert chosen("causal", plain=False) == chosen("window", plain=False) == chosen("window") == "flex"
    assert chosen("mask", plain=False) == "written out" and chosen("causal") == "sdpa"


@pytest.mark.parametrize("device", ["cpu", "npu", "meta"])
def test_elsewhere_nothing_is_chosen(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "features", lambda _: features(device))
    for over in ("causal", "window", "mask"):
        assert chosen(over) == "sdpa"  # type: ignore[arg-type]
        assert chosen(over, plain=False) == "written out"  # type: ignore[arg-type]


def reference(
    given: tuple[Tensor, Tensor, Tensor], window: int | None, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    places = torch.arange(given[0].shape[2])
    behind = places[:, None] - places
    allowed = (behind >= 0) & (behind < (window or len(places)))
    how = Scores(softcap=softcap, sinks=sinks)
    return masked_attention(*given, allowed, how)


def like_varlen(*, takes_groups: bool) -> Any:
    """torch's varlen attention in words of ours: each row alone, a window that ends at the query."""

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        assert ends_q.dtype == torch.int32 and torch.equal(ends_q, ends_k) and max_q == max_k
        assert enable_gqa == takes_groups and (takes_groups or query.shape[1] == key.shape[1])
        done = []
        for first, last in zip(ends_q.tolist(), ends_q[1:].tolist(), strict=False):
            row = [x[first:last].transpose(0, 1)[None] for x in (query, key, value)]
            behind = torch.arange(last - first)[:, None] - torch.arange(last - first)
            allowed = behind >= -window_size[1]
            if window_size[0] >= 0:
                allowed &= behind <= window_size[0]
            attended = scaled_dot_product_attention(
                *row, attn_mask=allowed, scale=scale, enable_gqa=takes_groups
            )
            done.append(attended[0].transpose(0, 1))
        return torch.cat(done)

    return kernel


@pytest.mark.parametrize("takes_groups", [True, False])
def test_varlen_is_asked_for_the_window_of_each_row(
    takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch 2.11 on it knows windows, and grouped heads later."""
    kernel = like_varlen(takes_groups=takes_groups)
    monkeypatch.setattr(kernels, "_varlen", lambda: kernel)
    way: kernels.Groups = "told" if takes_groups else "expanded"
    monkeypatch.setattr(kernels, "_varlen_groups", lambda *_: way)
    given = states()
    found = kernels.window_by_varlen(*given, 7, None)
    torch.testing.assert_close(found, reference(given, 7, None, None), atol=1e-12, rtol=0)


def test_varlen_of_this_torch_is_known_by_its_signature() -> None:
    assert kernels._varlen() is not None
    told = kernels.varlen_attention("enable_gqa") is not None
    assert told == (torch.__version__ >= "2.12")


def test_a_kernel_that_fails_its_trial_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def trial(kernel: Any, *, told: bool = True) -> kernels.Groups | None:
        monkeypatch.setattr(kernels, "_varlen", lambda: kernel)
        monkeypatch.setattr(kernels, "varlen_attention", lambda *_: kernel if told else None)
        kernels._varlen_groups.cache_clear()
        with torch.inference_mode():  # generation may be the first to ask
            found = kernels._varlen_groups(torch.device("cpu"), torch.float32)
        kernels._varlen_groups.cache_clear()
        return found

    right = like_varlen(takes_groups=True)
    with caplog.at_level(logging.WARNING):
        assert trial(right) == "told"
        assert trial(like_varlen(takes_groups=False), told=False) == "expanded"
        assert trial(lambda *args, **how: right(*args, **how, enable_gqa=True), told=False) == "as they are"
        assert not caplog.text
        assert not trial(lambda *args, **how: right(*args, **{**how, "window_size": (70, 0)}))
        assert "from plain attention" in caplog.text
        assert not trial(lambda *args, **how: right(*args, **how).detach().requires_grad_())
        assert not trial(None)
    assert "has none that knows windows" in caplog.text
    monkeypatch.undo()
    assert not kernels._varlen_works(torch.device("cpu"), torch.float32), "it has no kernel for a CPU"
    kernels._varlen_groups.cache_clear()


@pytest.mark.parametrize("window", [None, 7])
def test_packed_rows_of_different_lengths_are_one_call(
    on_cuda: list[str], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    right = like_varlen(takes_groups=True)
    monkeypatch.setattr(
        kernels, "_varlen", lambda: lambda *args, **how: calls.append(1) or right(*args, **how)
    )
    monkeypatch.setattr(kernels, "_varlen_groups", lambda *_: "told")
    lengths = [30, 5, 12]
    given = [x[:1, :, : sum(lengths)].to(HALF) for x in states(sum(lengths))]
    layout = PackedLayout.build(lengths)
    found = layout.attend(given[0], given[1], given[2], Scores(sliding_window=window))
    assert calls == [1]
    rows = [x.double().split(lengths, dim=2) for x in given]
    for row, mine in enumerate(found.double().split(lengths, dim=1)):
        wanted = reference((rows[0][row], rows[1][row], rows[2][row]), window, None, None)
        torch.testing.assert_close(mine, wanted.transpose(1, 2), atol=3e-2, rtol=3e-2)


def test_rows_of_one_length_and_long_rows_have_calls_of_their_own(
    on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_varlen", lambda: pytest.fail("it is called"))
    monkeypatch.setattr(attending, "LONG_ROW", 10)
    for lengths in ([9, 9], [20, 3]):
        given = [x[:1].to(HALF) for x in states(sum(lengths))]
        PackedLayout.build(lengths).attend(given[0], given[1], given[2], Scores())


@pytest.mark.parametrize("working", [["varlen"], []])
@pytest.mark.parametrize(
    "how",
    [
        Scores(),
        Scores(sliding_window=5),
        Scores(softcap=0.7),
        Scores(sliding_window=5, softcap=0.7, sinks=torch.tensor([0.1, -0.4, 1.0, 0.0])),
    ],
    ids=["plain", "window", "cap", "all"],
)
def test_packed_rows_get_the_same_by_every_kernel(
    how: Scores, working: list[str], on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_varlen", lambda: like_varlen(takes_groups=True))
    monkeypatch.setattr(kernels, "_varlen_groups", lambda *_: "told")
    lengths = [9, 30, 4, 28]
    tokens = sum(lengths)
    monkeypatch.setattr(kernels, "_fits_flash", lambda *_: True)  # float64, to be compared
    query, key, value = (x[:1] for x in states(tokens))
    on_cuda[:] = working
    found = PackedLayout.build(lengths).attend(query, key, value, how)
    monkeypatch.setattr(kernels, "features", features)
    wanted = PackedLayout.build(lengths).attend(query, key, value, how)
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def test_a_mask_over_grouped_heads_copies_the_heads(
    on_cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`scaled_dot_product_attention` has no fast kernel on CUDA for both."""
    asked: list[Any] = []

    def seen(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        asked.append((query.shape[1] == key.shape[1], how["enable_gqa"]))
        return scaled_dot_product_attention(query, key, value, **how)

    monkeypatch.setattr(attending, "scaled_dot_product_attention", seen)
    given = states()
    allowed = torch.ones(40, 40, dtype=torch.bool).tril()
    found = attend_allowed(*given, allowed, Scores())
    torch.testing.assert_close(found, reference(given, None, None, None), atol=1e-12, rtol=0)
    monkeypatch.setattr(kernels, "features", features)
    attend_allowed(*given, allowed, Scores())
    assert asked == [(True, False), (False, True)]


def test_the_log_of_a_load_says_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hybridflow"):
        probe_policy(PolicyModel(tiny_hf("gemma2")))
        probe_policy(PolicyModel(tiny_hf("llama")))
    assert "Gemma2ForCausalLM: attention by written out in layers 0-1" in caplog.text
    assert "LlamaForCausalLM: attention by sdpa in layers 0-1" in caplog.text
