"""`python -m hybridflow.trainer.main_sft key=value …`: supervised fine-tuning from the command line."""

from hybridflow.config import SFTConfig
from hybridflow.trainer.main import command, run

__all__ = ["main", "run"]

main = command("main_sft", SFTConfig)

if __name__ == "__main__":
    raise SystemExit(main())
