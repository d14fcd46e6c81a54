"""What is wrong with a run, as the user reads it."""

from __future__ import annotations

import pytest

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config
from hybridflow.errors import ConfigError


def problem(base: list[str], *overrides: str, root: type = PPOConfig) -> str:
    with pytest.raises(ConfigError) as error:
        prepare_config(root, [*base, *overrides])
    return str(error.value)
