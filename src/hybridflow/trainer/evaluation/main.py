"""`hybridflow eval` and `generate`: a prepared configuration in, answers and numbers in a folder out.

What can be seen to be wrong is said here, before torch is loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridflow.agent.early_checks import check_agents
from hybridflow.checkpoint.layout import MANIFEST
from hybridflow.config import PPOConfig
from hybridflow.data.early_checks import check_data
from hybridflow.errors import ConfigError, Stopped, install_extra
from hybridflow.observability.progress import progress
from hybridflow.rewards.early_checks import check_reward
from hybridflow.rollout.installed import check_installed
from hybridflow.stop_token import stop_token
from hybridflow.trainer.run_folder import RunFolder


@dataclass(frozen=True)
class ModelEndpoint:
    """An HTTP endpoint that speaks OpenAI's API and gives token ids, as vLLM's and `hybridflow serve` do."""

    url: str
    """Its base address, which as a rule ends in /v1."""
    model: str
    """Name of the model there."""
    api_key: str | None = None
    deadline: float = 600.0
    """Seconds for an answer, with all of its tries."""


@dataclass(frozen=True)
class Subject:
    """The model that answers."""

    name: str
    """The name that the user has given it."""
    state: str = ""
    """Identifies its weights among others under the same name; empty where that is not known."""
    step: int = 0
    """Training step of a checkpoint; its draws are those of the run's validation after that step."""
    weights: Callable[[bool], str] | None = None
    """Makes the Hugging Face folder that is loaded, given whether its own code may run; None:
    `actor_rollout_ref.model.path` is one.
    """
    endpoint: ModelEndpoint | None = None

    @classmethod
    def of(cls, model: str) -> Subject:
        """Return a Hugging Face folder or a hub name as a subject."""
        folder = Path(model).expanduser()
        if folder.is_dir():
            return cls(str(folder.resolve()), state_of(folder))
        return cls(model)


def state_of(folder: Path) -> str:
    """Return a digest that identifies the weights in a folder: from the digests of a checkpoint, or from the
    names, sizes and times of the files of weights.
    """
    manifest = folder / MANIFEST
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def evaluate(config: PPOConfig, subject: Subject, *, responses: Path | None = None) -> dict[str, Any]:
    """Answer the validation prompts in `trainer.default_local_dir`, where existing answers are
    kept; score them all and write the results, which are returned. With `responses` nothing is scored: the
    rows of the data go into that file, with the answers to each, and the answers are counted.

    Raises Stopped after SIGINT or SIGTERM; the answers so far stay.
    """
    rollout = config.actor_rollout_ref.rollout
    if subject.endpoint is None:
        check_installed(rollout)
    elif find_spec("httpx") is None:
        raise ConfigError(f"an endpoint needs httpx, which is not installed: {install_extra('openai')}")
    check_agents(config)
    splits = check_data(config)
    if responses is None:
        check_reward(config, splits)
    folder = RunFolder(config.trainer.default_local_dir)
    folder.check_writable()
    if config.trainer.controller == "ray":
        from hybridflow.controller.ray.preflight import look_ahead

        look_ahead(config.trainer, config.ray_kwargs)
    with progress.shown():
        try:
            with stop_token.listening():
                with progress.importing():
                    from hybridflow.trainer.evaluation.build import answer_and_score
                return answer_and_score(config, subject, responses)
        except Stopped as stopped:
            stopped.message = (
                f"interrupted {stopped.where}; the finished answers are in {folder.path}, and the same "
                "command goes on"
            )
            raise
