"""Wiring of a supervised run: from a prepared configuration to a trainer that is ready to `fit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import SFTConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.show import to_yaml
from hybridflow.controller import Factories, MeshInfo, Placement, RankInfo, WorkerHost
from hybridflow.controller.build import Start, hosting
from hybridflow.data.build import build_sft_data
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.distributed.device import resolve_device, set_threads
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits
from hybridflow.engines.build import build_engine
from hybridflow.models.lora import LoraSettings
from hybridflow.observability.progress import progress
from hybridflow.observability.timing import Timer
from hybridflow.trainer.models import end_tokens, model_arguments, row_cost
from hybridflow.trainer.resume import say_changes
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.run_trackers import run_trackers
from hybridflow.trainer.sft.state import SFTState
from hybridflow.trainer.sft.trainer import SFTTrainer
from hybridflow.trainer.stopping import StopSignals
from hybridflow.workers import RolloutGroup, RolloutWorker
from hybridflow.workers.rollout_build import build_rollout_worker
from hybridflow.workers.sft import SFTGroup, SFTWorker

ROLES = ("sft", "rollout")
"""The learner, and generation with its weights for whoever wants to look at its answers."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a run that its worker processes need."""

    config: SFTConfig
    total_steps: int
    nonfinite: Path
    end_tokens: tuple[int, ...]


@contextmanager
def build(
    config: SFTConfig, *, patience: float = 0.0, signals: StopSignals | None = None
) -> Iterator[SFTTrainer]:
    """Build everything a supervised run needs; processes, files and the run folder are released when the
    context ends, also after an error.

    `patience`: seconds to wait for devices that a lost node may bring back. `signals`: asks the run to stop;
    None: SIGINT and SIGTERM do what they do elsewhere.
    """
    set_threads(config.trainer.num_threads)
    folder = RunFolder(config.trainer.default_local_dir)
    signals = signals or StopSignals()
    with folder.held(), ExitStack() as stack:
        with progress.phase("looking for devices"):
            hosts = hosting(config.trainer, config.ray_kwargs, ROLES, patience=patience)
            start = stack.enter_context(hosts)
        signals.install()  # Ray has set its own when it was connected
        yield from _build(config, folder, start, signals)


def _build(config: SFTConfig, folder: RunFolder, start: Start, signals: StopSignals) -> Iterator[SFTTrainer]:
    trainer = config.trainer
    with progress.phase("reading tokenizer and data"):
        tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
        data = build_sft_data(config.data, tokenizer, trainer.seed)
    total_steps = trainer.total_training_steps or len(data.train_loader) * trainer.total_epochs
    facts = RunFacts(config, total_steps, folder.nonfinite, tuple(end_tokens(config.model, tokenizer)))
    with progress.phase("starting the workers"):
        backend = start(partial(_factories, facts), partial(_meshes, config))
    group = SFTGroup(backend, "sft")

    def write_huggingface(target: Path, with_weights: bool) -> None:
        group.write_huggingface(target, with_weights=with_weights)
        tokenizer.save_pretrained(target)

    state = SFTState(
        group, data.train_loader, config.checkpoint, write_huggingface, total_steps, trainer.seed
    )
    with progress.phase("looking for a checkpoint"):
        store = CheckpointStore(folder.path, keep=trainer.max_ckpt_to_keep)
        done = state.resume(store, trainer.resume_mode, trainer.resume_from_path)
    say_changes(done, folder.write_config(to_yaml(config)))
    folder.write_machine()
    assert tokenizer.pad_token_id is not None, "the tokenizer loader sets a pad token"
    with state.saves.given_up_at_the_end(store), run_trackers(config, folder, total_steps, done) as trackers:
        yield SFTTrainer(
            config=config,
            group=group,
            loader=data.train_loader,
            validation=data.val_dataset,
            state=state,
            store=store,
            trackers=trackers,
            timer=Timer(progress=progress),
            total_steps=total_steps,
            tokenizer=tokenizer,
            export=lambda target: write_huggingface(target, True),
            rollout=RolloutGroup(backend, "rollout"),
            signals=signals,
        )


def sizes(config: SFTConfig, world_size: int) -> ParallelLayout:
    """Return how the engine of a supervised run uses `world_size` processes."""
    engine = config.engine
    return ParallelLayout.from_keys(
        world_size, engine.fsdp_size, engine.ulysses_sequence_parallel_size, engine.tensor_parallel_size
    )


def _meshes(config: SFTConfig, placement: Placement) -> Mapping[str, MeshInfo]:
    world = placement.num_devices
    cost = row_cost(config.model) if config.trainer.balance_batch else None
    return {"sft": MeshInfo(world, sizes(config, world).axes(), cost), "rollout": MeshInfo(world)}


def _factories(facts: RunFacts, process: WorkerHost) -> Factories:
    """The factories of one process."""
    config = facts.config
    model = model_arguments(config.model, resolve_device(config.trainer.device))
    lora = LoraSettings.from_config(config.model, seed=config.trainer.seed)

    def sft(info: RankInfo) -> SFTWorker:
        with progress.phase("loading the model"):
            engine = build_engine(
                "policy",
                model,
                name="train",
                optim=config.optim,
                total_steps=facts.total_steps,
                grad_clip=config.trainer.grad_clip,
                max_nonfinite_steps=config.trainer.max_nonfinite_steps,
                dump_dir=facts.nonfinite,
                fsdp=config.engine,
                layout=sizes(config, process.place.world_size),
                activation_offload=config.model.enable_activation_offload,
                lora=lora,
            )
        return SFTWorker(
            engine, BatchLimits(config.data.max_token_len_per_gpu, config.data.micro_batch_size_per_gpu)
        )

    def rollout(info: RankInfo) -> RolloutWorker:
        learner = process.worker("sft")
        assert isinstance(learner, SFTWorker)
        return build_rollout_worker(
            RolloutConfig(max_num_seqs=512),
            actor_engine=learner.engine,
            model=model,
            eos_token_ids=facts.end_tokens,
            lora=lora,
        )

    return {"sft": sft, "rollout": rollout}
