"""What the commands `main_ppo` and `main_sft` do alike: keys in, a whole run, an exit status out.

The parts of a run are imported by `run`, not here, so that what is wrong with the keys, the run folder or the
cluster is said before torch is loaded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.hydra_flags import asks_for_help, help_text
from hybridflow.config.load import prepare_config
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.observability.progress import progress
from hybridflow.trainer.before_torch import check_before_torch
from hybridflow.trainer.stopping import StopSignals, stopping

logger = logging.getLogger(__name__)

C = TypeVar("C", PPOConfig, SFTConfig)
C_contra = TypeVar("C_contra", contravariant=True)


class Fits(Protocol):
    """A trainer that is ready to train."""

    def fit(self) -> dict[str, float]:
        """Train to the last step; return the last validation's metrics."""
        ...


class Build(Protocol[C_contra]):
    """Builds the trainer of a prepared run, and cleans up after it."""

    def __call__(
        self, config: C_contra, /, *, patience: float, signals: StopSignals
    ) -> AbstractContextManager[Fits]: ...


def run(config: C, load: Callable[[], Build[C]]) -> dict[str, float]:
    """Build the parts of a prepared run, train, and clean up; gives the last validation's metrics.

    `load` imports the function that builds them. Raises Stopped after SIGINT or SIGTERM, with what is done
    saved where the configuration asks for checkpoints.
    """
    check_before_torch(config)
    if config.trainer.controller == "ray":
        from hybridflow.controller.ray.preflight import look_ahead

        look_ahead(config.trainer, config.ray_kwargs)
    with progress.shown(), stopping(config) as signals:
        with progress.phase("importing torch and transformers"):
            build = load()
            from hybridflow.trainer.restarts import run_with_restarts

        def attempt(config: C, patience: float) -> dict[str, float]:
            with build(config, patience=patience, signals=signals) as trainer:
                return trainer.fit()

        metrics = run_with_restarts(config, attempt)
    folder = config.trainer.default_local_dir
    logger.info(
        "done: metrics, samples and checkpoints are in %s; `hybridflow view %s` shows them", folder, folder
    )
    return metrics


def main(module: str, schema: type[C], run: Callable[[C], object], arguments: Sequence[str] | None) -> int:
    """Run what the command line of `module` asks for; returns exit status 0."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help(words):
        sys.stdout.write(help_text(module))
        return 0
    setup_logging()
    prepared = prepare_config(schema, words)
    for note in prepared.notes:
        sys.stderr.write(f"note: {note}\n")
    run(prepared.config)
    return 0
