"""Router replay: recorded routes, replayed to the bit, with routers that learn; rows of several lengths."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zoo import SPARSE, packed_rows, tiny_hf, tiny_rows

from hybridflow.errors import ModelError
from hybridflow.models.exact_mode import ExactMode
from hybridflow.models.experts.layers import routers
from hybridflow.models.experts.routing import LIVE
from hybridflow.models.files.build import enable_gradient_checkpointing
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol import DataProto
from hybridflow.protocol.joining import join_rows
from hybridflow.protocol.packing import ROUTES, pack, share_prompts

NOISE = 0.01
"""Size of a change of weights, as a share of their mean size."""


def following(family: str) -> PolicyModel:
    policy = PolicyModel(tiny_hf(family))
    policy.follow_routes()
    return policy


def recorded(policy: PolicyModel, rows: DataProto) -> tuple[Tensor, Tensor]:
    """The log-probs [M] and the routes as a column [B, T, W]."""
    packed = pack(rows)
    with torch.no_grad():
        log_probs = policy(packed).log_probs
    return log_probs, packed.unpack_tokens(policy.routes_of(packed), rows.batch["attention_mask"], LIVE)


def with_routes(rows: DataProto, routes: Tensor) -> DataProto:
    return rows | DataProto.from_dict({ROUTES: routes})


@pytest.mark.parametrize("family", SPARSE)
def test_replayed_routes_are_the_recorded_ones_and_the_router_learns(family: str) -> None:
    plain = PolicyModel(tiny_hf(family))
    policy = following(family)
    rows = tiny_rows(((3, 20), (7, 25), (2, 21), (5, 30)))
    with torch.no_grad():
        wanted = plain(pack(rows)).log_probs
    before, routes = recorded(policy, rows)
    assert torch.equal(before, wanted), "recording changes no bit"
    again = pack(with_routes(rows, routes))
    assert torch.equal(policy(again).log_probs, wanted) and torch.equal(policy.routes_of(again), again.routes)
    # other weights: a router would choose otherwise now
    with torch.no_grad():
        for parameter in policy.parameters():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
            parameter += NOISE * parameter.abs().mean() * noise
    live, now = recorded(policy, rows)
    flips = int((routes != now).any(-1).sum())
    assert flips > 0
    replayed = policy(again).log_probs
    assert torch.equal(policy.routes_of(again), again.routes)
    assert policy.tape is not None and sum(int(each) for each in policy.tape.flips.values()) > 0
    assert (replayed - wanted).abs().mean() < (live - wanted).abs().mean()
    replayed.sum().backward()
    for router in routers(policy.hf).values():
        assert bool(router.weight.grad.any())


def test_tokens_without_a_route_are_routed_live() -> None:
    policy = following("qwen3_moe")
    rows = tiny_rows()
    log_probs, routes = recorded(policy, rows)
    others = torch.where(routes == LIVE, LIVE, (routes + 1) % 4).to(torch.int16)
    with torch.no_grad():
        assert not torch.equal(policy(pack(with_routes(rows, others))).log_probs, log_probs)
        none = torch.full_like(routes, LIVE)
        assert torch.equal(policy(pack(with_routes(rows, none))).log_probs, log_probs)
        none[1] = routes[1]
        none[2, :-1] = routes[2, :-1]
        assert torch.equal(policy(pack(with_routes(rows, none))).log_probs, log_probs)


def test_routes_stay_with_their_tokens_in_shared_prompts_and_wider_batches() -> None:
    policy = following("mixtral")
    rows = tiny_rows(((3, 6), (3, 6), (5, 2)))
    width = rows.batch["input_ids"].shape[1] - 6
    for name in ("input_ids", "prompts"):
        rows.batch[name][1, :width] = rows.batch[name][0, :width]
    _, routes = recorded(policy, rows)
    whole = with_routes(rows, routes)
    shared = share_prompts(pack(whole))
    assert shared.num_tokens < pack(whole).num_tokens and shared.routes is not None
    unpacked = shared.unpack_tokens(shared.routes, whole.batch["attention_mask"], LIVE)
    assert torch.equal(unpacked, routes)
    wide = join_rows([whole, with_routes(tiny_rows(((9, 1),)), torch.full((1, 10, 4), LIVE).short())], 0)
    packed = pack(wide)
    assert packed.routes is not None
    assert torch.equal(packed.routes[: len(pack(whole).routes)], pack(whole).routes)
    assert (packed.routes[len(pack(whole).routes) :] == LIVE).all()


def test_exact_mode_pads_rows_whose_routes_are_nobodys() -> None:
    policy = following("olmoe")
    rows = tiny_rows()
    log_probs, routes = recorded(policy, rows)
    policy.exact = ExactMode(32, 2)
    exact, again = recorded(policy, rows)
    assert torch.equal(again, routes) and torch.allclose(exact, log_probs, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(policy(pack(with_routes(rows, routes))).log_probs, exact)


def test_recomputed_layers_replay_too_and_are_counted_once() -> None:
    rows = tiny_rows()
    gradients = []
    routes = recorded(following("qwen2_moe"), rows)[1]
    others = torch.where(routes == LIVE, LIVE, (routes + 1) % 4).to(torch.int16)
    for checkpointing in (False, True):
        policy = following("qwen2_moe").train()
        if checkpointing:
            enable_gradient_checkpointing(policy.hf)
        policy(pack(with_routes(rows, others))).log_probs.sum().backward()
        assert policy.tape is not None and len(policy.tape.chosen) == 2
        gradients.append([parameter.grad for parameter in policy.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, plain, atol=1e-5, rtol=1e-4)


def test_the_auxiliary_loss_is_k_for_an_even_load_and_e_for_one_expert() -> None:
    policy = following("mixtral")
    routing = policy.routing
    assert routing is not None
    routing.balance_coef = 0.01
    packed = packed_rows(tiny_rows())
    for router in routers(policy.hf).values():
        router.weight.data.zero_()
    policy(packed)
    assert policy.tape is not None
    assert float(policy.tape.balance_loss().detach()) / routing.num_layers == pytest.approx(2.0, rel=1e-5)
    for layer in policy.tape.scores:
        policy.tape.scores[layer] = torch.tensor([[1.0, 0, 0, 0]]).expand(packed.num_tokens, 4)
        policy.tape.chosen[layer] = torch.zeros(packed.num_tokens, 1, dtype=torch.int64)
    assert float(policy.tape.balance_loss()) / routing.num_layers == 4.0


def test_a_dense_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"has no routers.*router_replay.mode=disabled"):
        PolicyModel(tiny_hf("llama")).follow_routes()
