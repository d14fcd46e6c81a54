"""`python -m hybridflow.trainer.main_ppo key=value …`: a run of the PPO family from the command line.

The parts of a run are imported by `run`, not here, so that what is wrong with the keys, the run folder or the
cluster is said before torch is loaded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from hybridflow.config import PPOConfig
from hybridflow.config.hydra_flags import asks_for_help, help_text
from hybridflow.config.load import prepare_config
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.observability.progress import progress
from hybridflow.rollout.installed import check_installed
from hybridflow.trainer.before_torch import check_before_torch
from hybridflow.trainer.command import ends_in_status
from hybridflow.trainer.stopping import stopping

logger = logging.getLogger(__name__)


def run(config: PPOConfig) -> dict[str, float]:
    """Build the parts of a prepared run, train, and clean up; gives the last validation's metrics.

    Raises Stopped after SIGINT or SIGTERM, with what is done saved where the configuration asks for
    checkpoints.
    """
    check_installed(config.actor_rollout_ref.rollout)
    check_before_torch(config)
    if config.trainer.controller == "ray":
        from hybridflow.controller.ray.preflight import look_ahead

        look_ahead(config.trainer, config.ray_kwargs)
    with progress.shown(), stopping(config) as signals:
        with progress.phase("importing torch and transformers"):
            from hybridflow.trainer.ppo.build import build
            from hybridflow.trainer.restarts import run_with_restarts

        def attempt(config: PPOConfig, patience: float) -> dict[str, float]:
            with build(config, patience=patience, signals=signals) as trainer:
                return trainer.fit()

        metrics = run_with_restarts(config, attempt)
    folder = config.trainer.default_local_dir
    logger.info(
        "done: metrics, samples and checkpoints are in %s; `hybridflow view %s` shows them", folder, folder
    )
    return metrics


@ends_in_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or what `ends_in_status` makes of an error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help(words):
        sys.stdout.write(help_text("main_ppo"))
        return 0
    setup_logging()
    prepared = prepare_config(PPOConfig, words)
    for note in prepared.notes:
        sys.stderr.write(f"note: {note}\n")
    run(prepared.config)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
