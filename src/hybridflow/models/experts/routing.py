"""Routes: the experts to which each token goes in each sparse layer, recorded in one pass and replayed in
another.

    layout.routes ──before each decoder layer──► its router ──topk──► chosen experts ──► recorded
                                                               ▲
                                                     replayed ─┘  (indices only)

Only indices are replayed. A router's own code computes the weights of the replayed experts from the logits of
the pass, so the weights are current, and the router learns (Ma et al. 2025, arXiv 2510.11370). Replaying the
routes that a router would have chosen anyway changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hybridflow.errors import ModelError
from hybridflow.models.experts.layers import count_choices, experts_per_token, num_experts, routers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hybridflow.models.parallel.sequence_parallel import SequenceCut
    from hybridflow.protocol.packing import PackedBatch

LIVE = -1
"""The expert of a token without a route: its router chooses."""


class RouteTape:
    """The routes of one forward pass over N tokens; a layout carries it as `routes`.

    Routers see further tokens where ranks fill up their parts or exact mode its rows: those come last, and
    are routed live and not counted.
    """

    def __init__(
        self,
        num_tokens: int,
        replayed: Tensor | None = None,
        *,
        keeps_scores: bool = False,
        total: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """`replayed` [N, L, K] int has the experts to go to, and `LIVE` in all of a token without a route.

        `keeps_scores` is for the auxiliary loss. The ranks of `group` share `total` tokens, N of which are
        this rank's; None: all are.
        """
        assert replayed is None or replayed.shape[0] == num_tokens, (
            f"routes {tuple(replayed.shape)} for {num_tokens} tokens"
        )
        self.num_tokens = num_tokens
        self.total = num_tokens if total is None else total
        self.group = group
        self.replayed = replayed
        self.keeps_scores = keeps_scores
        self.chosen: dict[int, Tensor] = {}
        """Experts [N, K] int64 of each sparse layer, in their order."""
        self.flips: dict[int, Tensor] = {}
        """Tokens of each sparse layer whose router would have chosen others than those replayed, 0-d each."""
        self.scores: dict[int, Tensor] = {}
        """Probabilities [N, E] that each router gives to all experts, where `keeps_scores`."""

    def wanted(self, layer: int, rows: int) -> Tensor | None:
        """Return the experts [rows, K] int64 for a router of `rows` rows, the padding last; None: live."""
        if self.replayed is None:
            return None
        wanted = self.replayed[:, layer].long()
        padding = rows - self.num_tokens
        if padding:
            wanted = torch.cat([wanted, wanted.new_full((padding, wanted.shape[1]), LIVE)])
        return wanted

    def note(self, layer: int, chosen: Tensor, scores: Tensor, flips: Tensor | None) -> None:
        """Keep what a router did; a layer that is computed again in the backward pass is noted once."""
        if layer in self.chosen:
            return
        self.chosen[layer] = chosen[: self.num_tokens].detach()
        if self.keeps_scores:
            self.scores[layer] = scores[: self.num_tokens]
        if flips is not None:
            self.flips[layer] = flips

    @property
    def routes(self) -> Tensor:
        """Return the experts of all tokens and sparse layers, [N, L, K] int16."""
        return torch.stack([self.chosen[layer] for layer in sorted(self.chosen)], 1).to(torch.int16)

    def balance_loss(self) -> Tensor:
        """Return E·Σ_e f_e·P_e, the sum over the sparse layers of this pass, 0-d: f_e is the number of
        choices of expert e a token, P_e its mean probability (Fedus et al. 2022, arXiv 2101.03961); K for a
        layer whose load is even.

        Both are of the tokens of all ranks that share them, which call it together; this rank's share is that
        of its own tokens' probabilities. The gradient flows through P.
        """
        loss = torch.zeros(())
        for layer, scores in self.scores.items():
            count = scores.shape[1]
            choices = count_choices(self.chosen[layer], count)
            if self.group is not None:
                dist.all_reduce(choices, group=self.group)
            loss = loss + count * (choices.float() / self.total * (scores.sum(0) / self.total)).sum()
        return loss


class Routing:
    """The routers of a model, made to follow the tape of the layout that a pass brings.

    Raises ModelError for a model without routers, or whose routers choose in another way than by one topk.
    """

    def __init__(self, hf: nn.Module, config: Any) -> None:
        found = routers(hf)
        self.name = type(hf).__name__
        if not found:
            raise ModelError(
                f"{self.name} has no routers of experts (modules named *TopKRouter): set "
                "actor_rollout_ref.actor.router_replay.mode=disabled"
            )
        self.num_layers = len(found)
        self.num_experts = num_experts(config)
        self.top_k = experts_per_token(config)
        self.balance_coef = 0.0
        """Weight of the auxiliary loss in an update; 0: there is none."""
        self._tape: RouteTape | None = None
        blocks = {module: name for name, module in hf.named_modules()}
        for column, router in enumerate(found.values()):
            router.forward = partial(self._route, column, router, router.forward)
            _block_of(hf, blocks[router]).register_forward_pre_hook(self._before, with_kwargs=True)

    def tape(self, packed: PackedBatch, cut: SequenceCut | None) -> RouteTape:
        """Return a tape for a pass over packed rows, which replays the routes that they have."""
        count = packed.num_tokens
        routes = packed.routes
        group = None
        if cut is not None:
            group = cut.group
            mine = cut.own_tokens
            count = mine.stop - mine.start
            if routes is not None:
                routes = routes[mine]
        if routes is not None:
            assert routes.shape[1] == self.width, (
                f"routes of {routes.shape[1]} experts a token, and this model has {self.width}"
            )
            routes = routes.unflatten(1, (self.num_layers, self.top_k))
        keeps_scores = self.balance_coef > 0 and torch.is_grad_enabled()
        return RouteTape(count, routes, keeps_scores=keeps_scores, total=packed.num_tokens, group=group)

    @property
    def width(self) -> int:
        """Numbers that the route of one token has, over all sparse layers."""
        return self.num_layers * self.top_k

    def _before(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Take the tape of a layer's pass: the layout comes again where the layer is recomputed."""
        self._tape = getattr(kwargs.get("layout"), "routes", None)

    def _route(self, layer: int, router: nn.Module, live: Callable[..., Any], states: Tensor) -> Any:
        """Run a router on states [..., H] under the tape."""
        tape = self._tape
        if tape is None:
            return live(states)
        with _Chosen(self.num_experts, self.top_k, tape, layer) as chosen:
            outputs = live(states)
        if chosen.calls != 1 and tape.replayed is not None:
            raise ModelError(
                f"{self.name}: its router chooses experts by {chosen.calls} calls of topk and not by one, so "
                "routes cannot be replayed: set actor_rollout_ref.actor.router_replay.mode=disabled"
            )
        tape.note(layer, outputs[-1], _probabilities(router, outputs[0]), chosen.flips)
        return outputs


def _probabilities(router: nn.Module, logits: Tensor) -> Tensor:
    """Return the probabilities [N, E] of all experts: a softmax, or sigmoids as parts of their sum."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if hasattr(router, "e_score_correction_bias"):
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)
    return logits.softmax(-1)


class _Chosen(TorchFunctionMode):
    """A mode in which the topk over all experts returns the experts of a tape, with their own values."""

    def __init__(self, num_experts: int, top_k: int, tape: RouteTape, layer: int) -> None:
        super().__init__()
        self.shape = (num_experts, top_k)
        self.tape = tape
        self.layer = layer
        self.calls = 0
        self.flips: Tensor | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return found
        scores = args[0]
        if scores.dim() != 2 or (scores.shape[1], found.indices.shape[1]) != self.shape:
            return found  # the choice among groups of experts
        self.calls += 1
        wanted = self.tape.wanted(self.layer, len(scores))
        if wanted is None:
            return found
        live = found.indices
        others = (live.sort(1).values != wanted.sort(1).values).any(1) & (wanted[:, 0] != LIVE)
        self.flips = others.sum()
        indices = torch.where(wanted == LIVE, live, wanted)
        return torch.return_types.topk((scores.gather(1, indices), indices))


def _block_of(hf: nn.Module, path: str) -> nn.Module:
    """Return the decoder layer, of a numbered list, that the module at `path` is in."""
    parts = path.split(".")
    number = next(place for place, part in enumerate(parts) if part.isdigit())
    return hf.get_submodule(".".join(parts[: number + 1]))
