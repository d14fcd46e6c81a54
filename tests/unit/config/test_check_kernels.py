"""`use_liger` is refused where it cannot be, and verl's keys of fused kernels say what is always so."""

from __future__ import annotations

import pytest

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import prepare_config
from hybridflow.config.verl_keys import status

MODEL = "actor_rollout_ref.model"
LIGER = f"{MODEL}.use_liger=true"


def test_liger_where_it_can_be(base: list[str]) -> None:
    config = prepare_config(PPOConfig, [*base, LIGER, "trainer.device=cuda"]).config
    assert config.actor_rollout_ref.model.use_liger and not config.critic.model.use_liger


@pytest.mark.parametrize(
    ("root", "block"), [(PPOConfig, MODEL), (PPOConfig, "critic.model"), (SFTConfig, "model")]
)
def test_fused_kernels_are_always_on_in_torch(root: type[PPOConfig | SFTConfig], block: str) -> None:
    assert "always on" in status(root, f"{block}.use_fused_kernels", True).reason
    backend = f"{block}.fused_kernel_options.impl_backend"
    assert {status(root, backend, name).kind for name in ("torch", "triton")} == {"no effect"}
    assert status(root, backend, "cutlass").kind == "refused"
