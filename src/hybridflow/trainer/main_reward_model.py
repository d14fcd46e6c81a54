"""`python -m hybridflow.trainer.main_reward_model key=value …`: a reward model from the command line."""

from hybridflow.config import RewardModelConfig
from hybridflow.trainer.main import command, run

__all__ = ["main", "run"]

main = command("main_reward_model", RewardModelConfig)

if __name__ == "__main__":
    raise SystemExit(main())
