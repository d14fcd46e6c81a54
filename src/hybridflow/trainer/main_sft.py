"""`python -m hybridflow.trainer.main_sft key=value …`: supervised fine-tuning from the command line."""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.config import SFTConfig
from hybridflow.trainer import main as shared
from hybridflow.trainer.command import ends_in_status


def run(config: SFTConfig) -> dict[str, float]:
    """See `main.run`."""
    return shared.run(config, _load)


def _load() -> shared.Build[SFTConfig]:
    from hybridflow.trainer.sft.build import build

    return build


@ends_in_status
def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or what `ends_in_status` makes of an error."""
    return shared.main("main_sft", SFTConfig, run, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
