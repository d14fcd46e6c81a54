"""`python -m hybridflow.trainer.sft_trainer key=value …`: verl's name of `main_sft`."""

from hybridflow.trainer.main_sft import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    raise SystemExit(main())
