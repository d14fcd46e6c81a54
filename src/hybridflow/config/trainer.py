"""`trainer.*`: length of the run, machine, logging, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hybridflow.config.schema import key

Tracker = Literal["console", "tensorboard", "jsonl", "wandb", "mlflow", "swanlab"]


@dataclass(frozen=True)
class TrainerConfig:
    project_name: str = key("hybridflow", "project, for trackers and the run folder")
    experiment_name: str = key("run", "experiment, for trackers and the run folder")
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "the run folder: config, metrics, samples, report, checkpoints",
    )
    logger: str | list[Tracker] = key(
        ["console", "tensorboard"], "where metrics go; jsonl is always written into the run folder"
    )
    total_epochs: int = key(
        30, "passes over the training data; with dynamic sampling the steps that they suffice for", minimum=1
    )
    total_training_steps: int | None = key(
        None, "stop after this many steps; null: from total_epochs", minimum=1
    )
    nnodes: int = key(1, "machines", minimum=1)
    n_gpus_per_node: int = key(1, "devices a machine (processes where there is no GPU)", minimum=1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where there is one, else cpu")
    num_threads: int | None = key(None, "CPU threads of torch; null: as torch finds them", minimum=1)
    controller: Literal["auto", "local", "ray"] = key(
        "auto", "local: all in this process; ray: a process for each device; auto: as needed"
    )
    resource_pools: dict[str, list[int]] = key(
        {}, "pools by name, the devices on each of their nodes; {}: one, of all devices"
    )
    placement: dict[str, str | list[str]] = key(
        {}, "pool of a role; those not named live in the first pool; rollout may have several"
    )
    balance_batch: bool = key(True, "deal rows to ranks by their tokens; false: by their number")
    max_restarts: int = key(
        0, "rebuild lost workers and go on from the newest checkpoint, at most this many times", minimum=0
    )
    worker_timeout: float = key(3600.0, "seconds that one call of the workers may take", above=0)
    heartbeat_timeout: float = key(
        10.0, "seconds without a sign of life after which a worker process counts as lost", above=0
    )
    startup_timeout: float = key(
        300.0, "seconds that worker processes may take to start and load their models", above=0
    )
    seed: int = key(1, "seed of the run: every draw is keyed by it, its purpose, step and row")
    val_before_train: bool = key(True, "validate before the first step")
    val_only: bool = key(False, "validate and stop")
    test_freq: int = key(
        -1,
        "validate every so many steps and at the end; -1: only at the end, and not at all with "
        "val_before_train=false",
        minimum=-1,
    )
    save_freq: int = key(-1, "save a checkpoint every so many steps and at the end; -1: never", minimum=-1)
    max_ckpt_to_keep: int | None = key(
        None, "older checkpoints beyond this many are removed; null: keep all", minimum=1
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto", "auto: from the newest whole checkpoint of the run folder, if any"
    )
    resume_from_path: str | None = key(None, "the global_step_N folder of resume_mode=resume_path")
    critic_warmup: int = key(0, "steps in which only the critic trains", minimum=0)
    max_nonfinite_steps: int = key(
        3, "stop after this many optimizer steps in a row were skipped as not finite", minimum=1
    )
    rollout_data_dir: str | None = key(None, "write the samples of each step there as JSONL; null: no")
    validation_data_dir: str | None = key(
        None, "write the samples of each validation there as JSONL; null: no"
    )
    log_val_generations: int = key(0, "validation samples shown in the console and the trackers", minimum=0)


@dataclass(frozen=True)
class SFTTrainerConfig:
    project_name: str = key("hybridflow-sft", "project, for trackers and the run folder")
    experiment_name: str = key("run", "experiment, for trackers and the run folder")
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}", "the run folder"
    )
    logger: str | list[Tracker] = key(
        ["console", "tensorboard"], "where metrics go; jsonl is always written into the run folder"
    )
    total_epochs: int = key(1, "passes over the training data", minimum=1)
    total_training_steps: int | None = key(
        None, "stop after this many steps; null: from total_epochs", minimum=1
    )
    nnodes: int = key(1, "machines", minimum=1)
    n_gpus_per_node: int = key(1, "devices a machine (processes where there is no GPU)", minimum=1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where there is one, else cpu")
    num_threads: int | None = key(None, "CPU threads of torch; null: as torch finds them", minimum=1)
    controller: Literal["auto", "local", "ray"] = key(
        "auto", "local: in this process; ray: a process for each device; auto: as needed"
    )
    balance_batch: bool = key(True, "deal rows to ranks by their tokens; false: by their number")
    max_restarts: int = key(
        0, "rebuild lost workers and go on from the newest checkpoint, at most this many times", minimum=0
    )
    worker_timeout: float = key(3600.0, "seconds that one call of the workers may take", above=0)
    heartbeat_timeout: float = key(
        10.0, "seconds without a sign of life after which a worker process counts as lost", above=0
    )
    startup_timeout: float = key(
        300.0, "seconds that worker processes may take to start and load their models", above=0
    )
    seed: int = key(1, "seed of the run")
    test_freq: int = key(
        -1, "validation loss every so many steps and at the end; -1: only at the end", minimum=-1
    )
    save_freq: int = key(
        -1, "save a checkpoint every so many steps and at the end; -1: only at the end", minimum=-1
    )
    max_ckpt_to_keep: int | None = key(
        None, "older checkpoints beyond this many are removed; null: keep all", minimum=1
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto", "auto: from the newest whole checkpoint of the run folder, if any"
    )
    resume_from_path: str | None = key(None, "the global_step_N folder of resume_mode=resume_path")
    max_nonfinite_steps: int = key(
        3, "stop after this many optimizer steps in a row were skipped as not finite", minimum=1
    )
    grad_clip: float | None = key(1.0, "largest gradient norm; null: no clipping", above=0)
