"""Exact mode on the workers: which mode this rank's engine can hold, and switching it on."""

from __future__ import annotations

from hybridflow.controller import Dispatch, Worker, register
from hybridflow.distributed.bit_sum import bit_sum
from hybridflow.distributed.boxes import Box
from hybridflow.models.exact import ExactMode
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import RolloutEngine, SharedModule
from hybridflow.rollout.exact import choose_exact_mode


def weight_sums(policy: PolicyModel) -> dict[str, int]:
    """Return a checksum of each weight's bits, by name."""
    return {
        name: int(bit_sum(weight.detach(), Box.whole(weight.shape)))
        for name, weight in policy.named_parameters()
    }


class ExactRollout(Worker):
    """The part of a rollout worker that exact mode needs.

    An engine that does not generate with a module of ours has no exact mode.
    """

    engine: RolloutEngine

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def choose_exact(self, *, longest: int, temperature: float) -> ExactMode | str:
        """The cheapest mode in which generation and training agree to the bit on this rank, or why there is
        none.
        """
        if not isinstance(self.engine, SharedModule):
            return "its engine does not generate with the module that trains"
        try:
            self.engine.wake_up()
            return choose_exact_mode(
                self.engine, self.engine.policy, longest=longest, temperature=temperature
            )
        finally:
            self.engine.sleep()

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def weight_sums(self) -> dict[str, int]:
        """Checksums of the weights that this rank generates with."""
        return weight_sums(self._policy)

    @register(dispatch_mode=Dispatch.ALL_TO_LIST)
    def set_exact(self, mode: ExactMode | None) -> None:
        """Generate in this mode from now on; None means the fastest way."""
        self._policy.exact = mode

    @property
    def _policy(self) -> PolicyModel:
        assert isinstance(self.engine, SharedModule), "asked only of an engine that has chosen an exact mode"
        return self.engine.policy
