"""Wiring of a supervised run: from a prepared configuration to a trainer that is ready to `fit`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

from hybridflow.checkpoint.layout import ACTOR
from hybridflow.config import SFTConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.controller import Factories, MeshInfo, Placement, RankInfo, WorkerHost
from hybridflow.data.build import build_sft_data
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.distributed.device import resolve_device
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits
from hybridflow.engines.build import build_engine
from hybridflow.models.lora import LoraSettings
from hybridflow.observability.progress import progress
from hybridflow.trainer.models import end_tokens, model_arguments, row_cost
from hybridflow.trainer.run import huggingface_writer, started, steps_of
from hybridflow.trainer.saving import SavedEngine
from hybridflow.trainer.sft.source import ConversationSource
from hybridflow.trainer.sft.step import SFTStep, SFTValidator
from hybridflow.trainer.state import RunState
from hybridflow.trainer.stopping import StopSignals
from hybridflow.trainer.trainer import Trainer
from hybridflow.workers import RolloutWorker
from hybridflow.workers.rollout_build import build_rollout_worker
from hybridflow.workers.sft import SFTGroup, SFTWorker

SFTTrainer: TypeAlias = Trainer[ConversationSource, SFTStep]

ROLES = ("sft", "rollout")
"""The learner, and generation with its weights for whoever wants to look at its answers."""


@contextmanager
def build(
    config: SFTConfig, *, patience: float = 0.0, signals: StopSignals | None = None
) -> Iterator[SFTTrainer]:
    """Build all that a supervised run needs, until the context ends; `patience`, `signals`: `run.started`."""
    trainer = config.trainer
    with started(config, ROLES, patience=patience, signals=signals) as run:
        with progress.phase("reading tokenizer and data"):
            tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
            data = build_sft_data(config.data, tokenizer, trainer.seed)
        total_steps = steps_of(config, data.train_loader)
        ends = tuple(end_tokens(config.model, tokenizer))
        factories = partial(_factories, config, total_steps, run.folder.nonfinite, ends)
        with progress.phase("starting the workers"):
            backend = run.start(factories, partial(_meshes, config))
        group = SFTGroup(backend, "sft")
        pad_id = int(tokenizer.pad_token_id)
        source = ConversationSource(data.train_loader, pad_id)
        state = RunState(
            kind="sft",
            seed=trainer.seed,
            total_steps=total_steps,
            source=source,
            engines={ACTOR: SavedEngine(group, config.checkpoint)},
            write_huggingface=huggingface_writer(group, tokenizer),
        )
        store = run.resume(state)
        validator = None
        if data.val_dataset is not None:
            validator = SFTValidator(data.val_dataset, group, config.data.train_batch_size, pad_id)
        save_freq = trainer.save_freq
        if save_freq <= 0:
            save_freq = total_steps  # at the end
        test_freq = trainer.test_freq
        if test_freq <= 0:
            test_freq = total_steps  # at the end, as whoever gives validation data expects
        with run.recorded(state, store, source) as trackers:
            yield Trainer(
                source=source,
                step=SFTStep(group, run.timer),
                validator=validator,
                state=state,
                store=store,
                trackers=trackers,
                timer=run.timer,
                total_steps=total_steps,
                test_freq=test_freq,
                save_freq=save_freq,
                signals=run.signals,
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


def _factories(
    config: SFTConfig, total_steps: int, nonfinite: Path, ends: tuple[int, ...], process: WorkerHost
) -> Factories:
    """The factories of one process."""
    model = model_arguments(config.model, resolve_device(config.trainer.device))
    lora = LoraSettings.from_config(config.model, seed=config.trainer.seed)

    def sft(info: RankInfo) -> SFTWorker:
        with progress.phase("loading the model"):
            engine = build_engine(
                "policy",
                model,
                name="train",
                optim=config.optim,
                total_steps=total_steps,
                grad_clip=config.trainer.grad_clip,
                max_nonfinite_steps=config.trainer.max_nonfinite_steps,
                dump_dir=nonfinite,
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
            eos_token_ids=ends,
            lora=lora,
        )

    return {"sft": sft, "rollout": rollout}
