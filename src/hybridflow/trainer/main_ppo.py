"""`python -m hybridflow.trainer.main_ppo key=value …`: a run of the PPO family from the command line."""

from hybridflow.config import PPOConfig
from hybridflow.trainer.main import command, run

__all__ = ["main", "run"]

main = command("main_ppo", PPOConfig)

if __name__ == "__main__":
    raise SystemExit(main())
