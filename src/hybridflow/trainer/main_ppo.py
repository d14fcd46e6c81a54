"""`python -m hybridflow.trainer.main_ppo key=value …`: a run of the PPO family from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.config import PPOConfig
from hybridflow.rollout.installed import check_installed
from hybridflow.trainer import main as shared
from hybridflow.trainer.command import ends_in_status


def run(config: PPOConfig) -> dict[str, float]:
    """See `main.run`."""
    check_installed(config.actor_rollout_ref.rollout)
    return shared.run(config, _load)


def _load() -> shared.Build[PPOConfig]:
    from hybridflow.trainer.ppo.build import build

    return build


@ends_in_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or what `ends_in_status` makes of an error."""
    return shared.main("main_ppo", PPOConfig, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
