"""`actor_rollout_ref.rollout.skip.*`: rollouts that are dumped once, and read back instead of generating."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import key


@dataclass(frozen=True)
class RolloutSkipConfig:
    """Scored rollouts on disk, for looking at training without waiting for generation."""

    enable: bool = key(
        False,
        "Dump the scored rollouts of each step, and read them back where they are there already for the same "
        "model, data, sampling and reward. They were sampled under the weights of the run that dumped them.",
    )
    dump_dir: str = key("~/.cache/hybridflow/rollouts", "Folder of the dumps, which runs may share.")
    action: Literal["cache", "repeat"] = key(
        "cache",
        "cache: a step reads its own dump, and is generated and dumped where there is none. repeat: steps "
        "train on the dumps that are there, over and over; nothing is generated for training.",
    )
