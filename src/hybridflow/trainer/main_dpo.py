"""`python -m hybridflow.trainer.main_dpo key=value …`: preference optimisation from the command line."""

from hybridflow.config import DPOConfig
from hybridflow.trainer.main import command, run

__all__ = ["main", "run"]

main = command("main_dpo", DPOConfig)

if __name__ == "__main__":
    raise SystemExit(main())
