"""The load of the experts in an update: how evenly tokens are spread, how far replayed routes are from live
ones, and the auxiliary loss that keeps the load even.

    RouteTape of each pass ──add──► tokens by layer and expert ──summed over ranks──► metrics
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.distributed.mesh import EngineMesh
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.models.experts.layers import count_choices
from hybridflow.models.experts.routing import Routing
from hybridflow.models.policy import PolicyModel
from hybridflow.observability.metrics import Metrics


class ExpertLoad:
    """The counts of one mini-batch, whose passes may have a part of the layers each.

    All ranks of `mesh` make and read one together; None means a single rank.
    """

    def __init__(
        self, policy: PolicyModel, routing: Routing, num_tokens: float, mesh: EngineMesh | None
    ) -> None:
        """`num_tokens` are those of this rank's rows, without dummies."""
        device = policy.device
        self.policy = policy
        self.routing = routing
        self.mesh = mesh
        self.tokens = torch.zeros(routing.num_layers, routing.num_experts, dtype=torch.float64, device=device)
        """Tokens of each expert, by layer."""
        self.routes = torch.zeros(3, dtype=torch.float64, device=device)
        """Tokens; those without a route; choices of a layer that a live router would have made otherwise."""
        self.replays = False
        self.balance = torch.zeros((), dtype=torch.float64, device=device)
        """The auxiliary loss without its weight, this rank's share."""
        self.total = torch.full((), num_tokens, dtype=torch.float64, device=device)
        """Tokens of the mini-batch."""
        if mesh is not None and routing.balance_coef:
            self.total *= mesh.returns  # ranks with the same rows count them once
            dist.all_reduce(self.total)

    @classmethod
    def of(
        cls, module: nn.Module, micros: Sequence[MicroBatch], mesh: EngineMesh | None
    ) -> ExpertLoad | None:
        """Return the counts for these micro-batches, or None where no routes are followed."""
        if not isinstance(module, PolicyModel) or module.routing is None:
            return None
        num_tokens = sum(micro.packed.num_tokens for micro in micros if micro.rows is not None)
        return cls(module, module.routing, float(num_tokens), mesh)

    def add(self, *, counts: bool, tells: bool = True) -> Tensor:
        """Count the newest pass, where it `counts`, and return its share of the auxiliary loss, 0-d.

        A pass weighs as much as it has of the mini-batch's tokens and of the layers. Of a micro-batch's
        passes, which have other layers each, one `tells` (counts) its tokens.
        """
        tape = self.policy.tape
        assert tape is not None, "a policy that follows routes has a tape of its pass"
        share = torch.zeros((), device=self.policy.device)
        if self.routing.balance_coef:
            weight = tape.total / self.total if counts else 0.0
            loss = tape.balance_loss() / self.routing.num_layers * weight
            self.balance += loss.detach()
            share = self.routing.balance_coef * loss
        if not counts:
            return share
        for layer, chosen in tape.chosen.items():
            self.tokens[layer] += count_choices(chosen, self.tokens.shape[1])
        if tells:
            self.routes[0] += tape.num_tokens
        if tape.replayed is not None:
            self.replays = True
            self.routes[1] += tells * (tape.replayed[:, 0, 0] < 0).sum()
            self.routes[2] += sum(tape.flips.values())
        return share

    def add_to(self, metrics: Metrics, name: str) -> None:
        """Add what is known of the mini-batch to the metrics of one rank."""
        if self.mesh is not None:
            for counts in (self.tokens, self.routes, self.balance):
                dist.all_reduce(counts)
            self.balance /= self.mesh.layout.tp  # each of these ranks has counted all of its tokens
            if not self.mesh.reports:
                return
        shares = self.tokens / self.tokens.sum(1, keepdim=True).clamp(min=1)
        number = self.tokens.shape[1]
        entropy = torch.special.entr(shares).sum(1) / math.log(number)
        # they stay on the device until all metrics of the step are read together
        metrics.add_mean(f"{name}/moe/load_entropy", entropy.mean())
        metrics.add_max(f"{name}/moe/load_max", shares.max() * number)
        metrics.add_mean(f"{name}/moe/idle_experts", (self.tokens == 0).sum())
        if self.routing.balance_coef:
            metrics.add_mean(f"{name}/moe/balance_loss", self.balance)
        if self.replays:
            tokens, without, flips = self.routes
            choices = (tokens - without) * len(self.tokens)
            metrics.add_mean(f"{name}/moe/without_route", without, tokens)
            metrics.add_mean(f"{name}/moe/flips", flips, choices.clamp(min=1.0))
