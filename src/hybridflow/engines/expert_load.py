"""The load of the experts in an update: how evenly tokens are spread, how far replayed routes are from live
ones, and the auxiliary loss that keeps the load even.

    RouteTape of each micro-batch ──add──► tokens by layer and expert ──summed over ranks──► metrics
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.distributed.process_group import rank_and_size
from hybridflow.models.policy import PolicyModel
from hybridflow.models.routing import Routing
from hybridflow.observability.metrics import Metrics


class ExpertLoad:
    """The counts of one mini-batch. With `shared`, all ranks of the world make and read one together."""

    def __init__(self, policy: PolicyModel, routing: Routing, num_tokens: float, shared: bool) -> None:
        device = policy.device
        self.policy = policy
        self.routing = routing
        self.shared = shared
        self.tokens = torch.zeros(routing.num_layers, routing.num_experts, dtype=torch.float64, device=device)
        """Tokens of each expert, by layer."""
        self.routes = torch.zeros(3, dtype=torch.float64, device=device)
        """Tokens; those without a route; choices of a layer that a live router would have made otherwise."""
        self.replays = False
        self.balance = torch.zeros((), dtype=torch.float64, device=device)
        """The auxiliary loss without its weight, this rank's share."""
        total = torch.tensor(num_tokens, dtype=torch.float64, device=device)
        if shared and routing.balance_coef:
            dist.all_reduce(total)
        self.total = total

    @classmethod
    def of(cls, module: nn.Module, num_tokens: Sequence[int], shared: bool) -> ExpertLoad | None:
        """Return the counts for micro-batches of so many tokens, or None where no routes are followed."""
        if not isinstance(module, PolicyModel) or module.routing is None:
            return None
        return cls(module, module.routing, float(sum(num_tokens)), shared)

    def add(self, *, counts: bool) -> Tensor:
        """Count the newest pass, where it `counts`, and return its share of the auxiliary loss, 0-d.

        A pass weighs as much as it has of the mini-batch's tokens.
        """
        tape = self.policy.tape
        assert tape is not None, "a policy that follows routes has a tape of its pass"
        share = torch.zeros((), device=self.policy.device)
        if self.routing.balance_coef:
            loss = tape.balance_loss() * (tape.num_tokens / self.total)
            self.balance += loss.detach()
            share = self.routing.balance_coef * loss
        if not counts:
            return share
        for layer, chosen in tape.chosen.items():
            self.tokens[layer] += torch.bincount(chosen.reshape(-1), minlength=self.tokens.shape[1])
        self.routes[0] += tape.num_tokens
        if tape.replayed is not None:
            self.replays = True
            self.routes[1] += (tape.replayed[:, 0, 0] < 0).sum()
            self.routes[2] += sum(tape.flips.values())
        return share

    def add_to(self, metrics: Metrics, name: str) -> None:
        """Add what is known of the mini-batch to the metrics of its first rank."""
        if self.shared:
            for counts in (self.tokens, self.routes, self.balance):
                dist.all_reduce(counts)
        if rank_and_size()[0]:
            return
        shares = self.tokens / self.tokens.sum(1, keepdim=True).clamp(min=1)
        number = self.tokens.shape[1]
        entropy = torch.special.entr(shares).sum(1) / math.log(number)
        metrics.add_mean(f"{name}/moe/load_entropy", float(entropy.mean()))
        metrics.add_max(f"{name}/moe/load_max", float(shares.max()) * number)
        metrics.add_mean(f"{name}/moe/idle_experts", float((self.tokens == 0).sum()))
        if self.routing.balance_coef:
            metrics.add_mean(f"{name}/moe/balance_loss", float(self.balance))
        if self.replays:
            tokens, without, flips = self.routes.tolist()
            choices = (tokens - without) * len(self.tokens)
            metrics.add_mean(f"{name}/moe/without_route", without, tokens)
            metrics.add_mean(f"{name}/moe/flips", flips, max(choices, 1.0))
