"""`trainer.*`: length of the run, machine, logging, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hybridflow.config.reward import JUDGE_APART
from hybridflow.config.schema import excludes, group, key, less_than, needs, read_by, surprises

BETWEEN_UPDATES = "it has no effect where a batch is generated between two updates"
ASYNCHRONOUS = "trainer.schedule=one_step_off, exact_async, fully_async or colocated_async, or leave it out"

Tracker = Literal[
    "console", "tensorboard", "jsonl", "wandb", "mlflow", "swanlab", "trackio", "clearml", "weave"
]
TRACKER_LIBRARIES: Mapping[str, str] = {
    "tensorboard": "2.17",
    "wandb": "0.19",
    "mlflow": "2.16",
    "swanlab": "0.8",
    "trackio": "0.20",
    "clearml": "2.0",
    "weave": "0.52",
}
"""Trackers of other projects, with the oldest version of the library; it, its module and its extra have the
tracker's name.
"""


@dataclass(frozen=True)
class PrometheusConfig:
    """An address at which Prometheus scrapes the metrics of a run."""

    enable: bool = key(False, "Serve the metrics of the run for Prometheus (extra `prometheus`).")
    host: str = key("127.0.0.1", "Address to listen at; 0.0.0.0: all of the machine's.")
    port: int = key(9400, "Port to listen at; 0: a free one, which the log says.", minimum=0, maximum=65535)
    file: str | None = key(
        None,
        "Configuration of Prometheus into which this run is written as the job hybridflow; what else it has "
        "stays. null: none.",
    )
    reload_port: int | None = key(
        None,
        "Port of a Prometheus on this machine that is asked to read `file` again; it wants "
        "--web.enable-lifecycle. null: nobody is asked.",
        minimum=1,
        maximum=65535,
    )
    served_model_name: str | None = key(None, "Value of the label model_name; null: no such label.")


@dataclass(frozen=True)
class BaseTrainerConfig:
    """Length of the run, machines, logging and checkpoints: the keys that every kind of run has."""

    project_name: str = key("hybridflow", "Name of the project, for trackers and for the run folder.")
    experiment_name: str = key("run", "Name of the experiment, for trackers and for the run folder.")
    default_local_dir: str = key(
        "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
        "Run folder, which holds the configuration, metrics, the report, checkpoints and any samples.",
    )
    logger: str | list[Tracker] = key(
        ["console", "tensorboard"],
        "Trackers that get the metrics. jsonl is always written into the run folder.",
    )
    on_missing: Literal["refuse", "fallback"] = key(
        "refuse",
        "What happens where the run asks for an engine, a tracker, a device or processes that this machine "
        "lacks. fallback: it runs with what is here (native, other trackers, fewer processes and nothing "
        "spread over them), and a line says so for each.",
    )
    wandb_proxy: str | None = key(
        None,
        "Address of the proxy for Weights & Biases alone; null: as the environment says.",
        schemes=("*",),
    )
    alert_webhook: str | None = key(
        None,
        "Address (https://…) that warnings about the run are posted to as JSON, with their text in `text` as "
        "chats read it; null: they are only logged.",
        schemes=("http", "https"),
    )
    prometheus: PrometheusConfig = group(PrometheusConfig)
    total_epochs: int = key(
        30,
        "Passes over the training data. With dynamic sampling they set the number of steps, which may draw "
        "further rows.",
        minimum=1,
    )
    total_training_steps: int | None = key(
        None, "Number of training steps after which the run ends; null: total_epochs decides.", minimum=1
    )
    nnodes: int = key(
        1,
        "Number of machines.",
        surprises(".resource_pools", "trainer.resource_pools says which devices there are"),
        minimum=1,
    )
    n_gpus_per_node: int = key(
        1,
        "Devices on each machine, or processes where there is no GPU.",
        surprises(".resource_pools", "trainer.resource_pools says which devices there are"),
        minimum=1,
    )
    device: str = key(
        "auto",
        "Device that computes: auto, cpu, cuda, npu, or one that an installed plugin adds. auto: an "
        "accelerator where there is one, else cpu. cuda means AMD's GPUs too, with a ROCm build of torch; "
        "npu wants torch_npu.",
    )
    num_threads: int | None = key(
        None,
        "CPU threads of torch in each process; null: torch chooses. Results repeat to the bit only with the "
        "same number.",
        minimum=1,
    )
    controller: Literal["auto", "local", "ray"] = key(
        "auto",
        "Where the roles run: local is this one process, ray is a process for each device, auto chooses by "
        "the number of devices.",
    )
    balance_batch: bool = key(
        True, "Deal rows to ranks so that each has about as many tokens; false: as many rows."
    )
    max_restarts: int = key(
        0,
        "How often a run that lost workers rebuilds them and goes on from the newest checkpoint; 0: it ends.",
        surprises(".save_freq<1", "a restart begins at step 1 again"),
        minimum=0,
    )
    worker_timeout: float = key(
        3600.0,
        "Under Ray, seconds that one call of the workers may take, and that an engine with requests may be "
        "stepped without reading or sampling a token; then they count as lost.",
        above=0,
    )
    heartbeat_timeout: float = key(
        10.0, "Seconds without a sign of life after which a worker process counts as lost.", above=0
    )
    startup_timeout: float = key(
        300.0, "Seconds that worker processes may take to start and load their models.", above=0
    )
    seed: int = key(
        1, "Seed of the run. Every random draw is keyed by it, the purpose, the step and the row."
    )
    test_freq: int = key(
        -1,
        "Validate every so many steps, and at the end; -1: only at the end, and not at all with "
        "val_before_train=false.",
        minimum=-1,
    )
    save_freq: int = key(-1, "Save a checkpoint every so many steps, and at the end; -1: never.", minimum=-1)
    esi_redundant_time: float = key(
        0.0,
        "Seconds by which a checkpoint is saved earlier than needed, where the environment says when the "
        "machine is taken back (elastic instances). It is saved once the time left is no longer than the "
        "longest step, the longest save and these, if the run saves at all.",
        minimum=0,
    )
    max_ckpt_to_keep: int | None = key(
        None, "Number of checkpoints that are kept; older ones are removed. null: keep all.", minimum=1
    )
    remote_checkpoint_dir: str | None = key(
        None,
        "Address of a folder into which each checkpoint is copied, for example hdfs://… or s3://…; a run "
        "whose run folder has no checkpoint goes on from the newest one there. max_ckpt_to_keep holds there "
        "too. null: none.",
    )
    resume_mode: Literal["auto", "disable", "resume_path"] = key(
        "auto",
        "auto goes on from the newest whole checkpoint of the run folder, if there is one; disable starts "
        "anew; resume_path goes on from resume_from_path.",
        needs(".resume_from_path", "it goes on from a global_step_N folder", at="=resume_path"),
    )
    resume_from_path: str | None = key(
        None,
        "The global_step_N folder of resume_mode=resume_path.",
        needs(".resume_mode=resume_path", "no other mode reads it"),
    )
    resume_other_model: bool = key(
        False,
        "Go on from a checkpoint that was made with another model, other adapters or another tokenizer, with "
        "a warning; false: that is an error. A copy of a model's folder is the same model.",
    )
    max_nonfinite_steps: int = key(
        3,
        "Stop the run when this many optimizer steps in a row were skipped because a number was not finite.",
        minimum=1,
    )


RowStoreName = Literal["auto", "transferqueue"]
ScheduleName = Literal["sync", "one_step_off", "exact_async", "fully_async", "colocated_async"]
EXACT_SCHEDULES = ("one_step_off", "exact_async")
"""Schedules in which each batch is generated whole under one version of the weights."""


@dataclass(frozen=True)
class AsyncConfig:
    """How far generation may run ahead of training; read by the schedules other than sync.

    Staleness is how many training steps lie between the weights that sampled a token and those it trains.
    """

    run_ahead: float = key(
        1.0,
        "Steps that generation runs ahead of training; it sets the mean staleness. A fraction is a part of a "
        "step's groups. exact_async takes whole steps, one_step_off 1. 0: nothing is generated ahead.",
        excludes("trainer.schedule=sync", BETWEEN_UPDATES, way=ASYNCHRONOUS),
        minimum=0,
    )
    max_staleness: int | None = key(
        None,
        "Largest staleness of any token that is trained; it always holds: a step waits for groups that would "
        "pass it. null: run_ahead for the exact schedules, three times that, rounded up, for the others.",
        excludes("trainer.schedule=sync", BETWEEN_UPDATES, way=ASYNCHRONOUS),
        minimum=0,
    )
    partial_rollout: bool = key(
        True,
        "New weights are taken between two tokens of a response that goes on; false: once all responses that "
        "were begun are whole. The exact schedules never change weights within a response.",
        excludes("trainer.schedule=sync", BETWEEN_UPDATES, way=ASYNCHRONOUS, at="=false"),
        read_by(
            "trainer.schedule=sync|fully_async|colocated_async",
            "a response is generated whole under one version of the weights",
        ),
    )
    max_concurrent_groups: int | None = key(
        None,
        "Most groups that are generated at once; null: as many as run_ahead admits.",
        excludes("trainer.schedule=sync", BETWEEN_UPDATES, way=ASYNCHRONOUS),
        minimum=1,
    )


@dataclass(frozen=True)
class TrainerConfig(BaseTrainerConfig):
    """A PPO run: pools of devices, validation by generated answers, and samples."""

    schedule: ScheduleName = key(
        "sync",
        "When batches are generated: sync between two updates; one_step_off and exact_async beside training, "
        "each batch whole under one version of the weights, whatever the timing; fully_async and "
        "colocated_async as fast as run_ahead and max_staleness allow.",
        excludes(
            "trainer.placement.rollout",
            "it generates on the actor's devices, and generation has devices of its own",
            at="=colocated_async",
            way="trainer.schedule=fully_async, or leave the rollout out of trainer.placement",
        ),
    )
    async_: AsyncConfig = group(AsyncConfig)

    resource_pools: dict[str, list[int]] = key(
        {},
        "Pools of devices by name, each a list of the devices on each of its nodes, for example {train: "
        "[4], gen: [4]}; {}: one pool of all devices.",
    )
    placement: dict[str, str | list[str]] = key(
        {},
        "Pool of each role, for example {rollout: gen}. A role that is not named is in the first pool; "
        "rollout may have several.",
    )
    num_collectors: int = key(
        0,
        "Processes without a device that play the groups of training under Ray, from request to score, so "
        "that their tokens do not pass the trainer's process. They share reward.num_workers and "
        "agent.num_workers out, with at least one each. 0: the trainer's process does it. "
        "trainer.controller=local refuses others, because tokens pass no process there.",
        excludes(
            ".controller=local",
            "in one process, without Ray, tokens pass no other",
            way="trainer.controller=ray, or num_collectors=0",
        ),
        excludes(
            "reward.reward_model.kind=score|token_score",
            "the model scores all responses of a step together, and no collector has them all",
            way="trainer.num_collectors=0 or reward.reward_model.enable=false",
        ),
        excludes(
            "reward.reward_model.kind=generative",
            "no collector is given the judge's address, which is one of the trainer's machine alone",
            way=f"trainer.num_collectors=0, or {JUDGE_APART}",
        ),
        excludes(
            "reward.manager",
            "a manager scores all responses of a step in one call, and no collector has them all",
        ),
        excludes(
            "actor_rollout_ref.rollout.agent.endpoint_port", "several processes cannot listen at one port"
        ),
        minimum=0,
    )
    row_store: RowStoreName = key(
        "auto",
        "Where the columns of rows wait for workers to read them: auto is memory in one process and Ray's "
        "object store under Ray; transferqueue is the package TransferQueue (extra transferqueue), which "
        "needs Ray.",
        excludes(
            ".controller=local",
            "the package needs the processes of Ray",
            at="=transferqueue",
            way="trainer.controller=ray, or row_store=auto",
        ),
    )
    transfer_queue: dict[str, Any] = key(
        {},
        "Settings of TransferQueue where trainer.row_store=transferqueue starts it, named as in the "
        "package's config.yaml, for example {backend: {storage_backend: MooncakeStore}}.",
        read_by(".row_store=transferqueue"),
    )
    val_before_train: bool = key(True, "Validate before the first step.")
    val_in_background: bool = key(
        False,
        "Validate beside training: the weights of the step go to a replica of the rollout on devices of its "
        "own, started by Ray. Its pool is added to trainer.resource_pools where "
        "trainer.placement.validation names none. The numbers are logged under their own step once they are "
        "there; the next validation waits for them, and so does a checkpoint of a later step.",
        excludes(
            ".controller=local",
            "the replica is a process of its own, which Ray starts",
            way="trainer.controller=auto or ray, or val_in_background=false",
        ),
        excludes(".val_only", "nothing is trained beside it", way="val_in_background=false"),
        excludes(
            ".row_store=transferqueue",
            "the replica has processes of its own, which are no part of the run's queue",
            way="trainer.row_store=auto, or val_in_background=false",
        ),
        excludes(
            "reward.reward_model.kind=score|token_score",
            "the model scores on devices that train",
            way="trainer.val_in_background=false, or reward.reward_model.kind=generative",
        ),
        excludes(
            "reward.manager", "one manager would be called for training and for validation at the same time"
        ),
        excludes(
            "actor_rollout_ref.rollout.agent.endpoint_port",
            "the agents of training and those of validation cannot listen at one port",
        ),
        excludes(
            "actor_rollout_ref.rollout.server.address",
            "the replica would generate in the servers of the rollout, with weights of another step",
        ),
        excludes(
            "reward.num_workers=0",
            "the reward function would be called in two threads of the trainer's process at the same time",
        ),
    )
    val_only: bool = key(False, "Validate once, and end the run.")
    step_class: str | None = key(
        None,
        "Training step of your own: a subclass of PPOStep, as path/to/file.py:Name or package.module:Name. "
        "null: PPOStep.",
    )
    critic_warmup: int = key(
        0,
        "Number of first steps in which only the critic trains.",
        less_than(".total_training_steps", "and leaves no step in which the actor trains"),
        surprises("critic.enable=false", "the actor stands still in these steps, and nothing learns in them"),
        minimum=0,
    )
    keep_rows: bool = key(
        False,
        "Write the rows of each step, as they were trained, into rows/ of the run folder, for `hybridflow "
        "diff`, `replay` and `reverify`.",
    )
    rollout_data_dir: str | None = key(
        None, "Folder into which the samples of each step are written as JSON lines; null: none."
    )
    validation_data_dir: str | None = key(
        None, "Folder into which the samples of each validation are written as JSON lines; null: none."
    )
    log_val_generations: int = key(
        0, "Number of validation samples that the console and the trackers show.", minimum=0
    )


@dataclass(frozen=True)
class SFTTrainerConfig(BaseTrainerConfig):
    """A supervised run, which validates and saves at least at its end."""

    project_name: str = key("hybridflow-sft", "Name of the project, for trackers and for the run folder.")
    total_epochs: int = key(1, "Passes over the training data.", minimum=1)
    test_freq: int = key(
        -1,
        "Compute the validation loss every so many steps, and at the end; -1: only at the end.",
        minimum=-1,
    )
    save_freq: int = key(
        -1, "Save a checkpoint every so many steps, and at the end; -1: only at the end.", minimum=-1
    )
    grad_clip: float | None = key(
        1.0, "Largest norm of the gradient; a larger one is scaled down to it. null: no clipping.", above=0
    )
