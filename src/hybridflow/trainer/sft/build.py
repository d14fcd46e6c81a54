"""Wiring of a run that learns from data as it is (`kinds.py`): from a prepared configuration to a trainer
that is ready to `fit`. Log-probs of a reference are computed once for all comparisons, and kept:

    dataset ──digest──┐
    weights ──checksum┤
    model's settings ─┴─► RUN/reference/SPLIT, if it has the same; else one pass over the data ──► dataset

The reference is the model as the run starts, before a checkpoint is read; of a model with adapters it is the
base below them. So no second model is ever in memory.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hybridflow.checkpoint.layout import ACTOR
from hybridflow.config import DPOConfig, SFTConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.controller import Factories, MeshInfo, Placement, RankInfo, WorkerHost
from hybridflow.data.build import LearningData
from hybridflow.data.preference import Comparison, PreferenceDataset
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.distributed.device import resolve_device
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.engines import BatchLimits
from hybridflow.engines.build import build_engine
from hybridflow.errors import DataError
from hybridflow.models.adapters.lora import LoraSettings
from hybridflow.observability.progress import progress
from hybridflow.protocol import DataProto
from hybridflow.trainer.models import end_tokens, model_arguments, row_cost
from hybridflow.trainer.profiling import StepProfiler
from hybridflow.trainer.resume import model_facts
from hybridflow.trainer.run import huggingface_writer, started, steps_of
from hybridflow.trainer.sft.kinds import kind_of
from hybridflow.trainer.sft.step import RowSource, SFTStep, SFTValidator
from hybridflow.trainer.state import RunState, SavedEngine
from hybridflow.trainer.stopping import expiry_of
from hybridflow.trainer.trainer import Trainer
from hybridflow.workers import RolloutWorker
from hybridflow.workers.comparison import ComparisonGroup, ComparisonWorker
from hybridflow.workers.rollout_build import build_rollout_worker
from hybridflow.workers.sft import SFTGroup, SFTWorker

logger = logging.getLogger(__name__)

SFTTrainer: TypeAlias = Trainer[RowSource[Any], SFTStep]


@contextmanager
def build(config: SFTConfig, *, patience: float = 0.0) -> Iterator[SFTTrainer]:
    """Build all that such a run needs, until the context ends; `patience`: `run.started`."""
    trainer = config.trainer
    kind = kind_of(config)
    with started(config, roles_of(config), patience=patience) as run:
        with progress.phase("reading tokenizer and data"):
            tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
            data = kind.load_data(config, tokenizer)
        total_steps = steps_of(config, data.train_loader)
        ends = tuple(end_tokens(config.model, tokenizer))
        factories = partial(_factories, config, total_steps, run.folder.nonfinite, ends)
        with progress.phase("starting the workers"):
            backend = run.start(factories, partial(_meshes, config))
        group = kind.group(backend, kind.name)
        pad_id = int(tokenizer.pad_token_id)

        def make_rows(items: Sequence[Any]) -> DataProto:
            return kind.make_rows(items, pad_id)

        source = RowSource(data.train_loader, make_rows)
        state = RunState(
            kind=kind.name,
            seed=trainer.seed,
            total_steps=total_steps,
            source=source,
            models=model_facts(config),
            may_change_model=trainer.resume_other_model,
            engines={ACTOR: SavedEngine(group, config.checkpoint)},
            write_huggingface=huggingface_writer(group, tokenizer),
        )
        if isinstance(config, DPOConfig) and config.algorithm.needs_reference:
            with progress.phase("log-probs of the reference model"):
                _add_reference(config, data, group, make_rows, run.folder.path / "reference")
        store = run.resume(state)
        validator = None
        if data.val_dataset is not None:
            validator = SFTValidator(data.val_dataset, group, config.data.train_batch_size, make_rows)
        save_freq = trainer.save_freq
        if save_freq <= 0:
            save_freq = total_steps  # at the end
        test_freq = trainer.test_freq
        if test_freq <= 0:
            test_freq = total_steps  # at the end, as validation data is given
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
                expiry=expiry_of(trainer.esi_redundant_time),
                profiling=StepProfiler(config.global_profiler, [group], run.folder.path),
            )


def _add_reference(
    config: DPOConfig,
    data: LearningData[Comparison],
    group: SFTGroup | ComparisonGroup,
    make_rows: Callable[[Sequence[Comparison]], DataProto],
    folder: Path,
) -> None:
    splits = {"train": data.train_loader.dataset, "validation": data.val_dataset}
    assert isinstance(group, ComparisonGroup), "a preference loss compares"
    add_reference(
        {name: dataset for name, dataset in splits.items() if isinstance(dataset, PreferenceDataset)},
        group,
        folder,
        make_rows,
        batch_size=config.data.train_batch_size,
        without_adapters=LoraSettings.from_config(config.model, seed=config.trainer.seed) is not None,
        settings=repr((config.model, config.engine.mixed_precision)),
    )


def roles_of(config: SFTConfig) -> tuple[str, ...]:
    """Return the roles of a run: the learner and, where it generates, the rollout with its weights."""
    kind = kind_of(config)
    if kind.generates:
        return (kind.name, "rollout")
    return (kind.name,)


def sizes(config: SFTConfig, world_size: int) -> ParallelLayout:
    """Return how the engine of a supervised run uses `world_size` processes."""
    engine = config.engine
    return ParallelLayout.from_keys(
        world_size,
        engine.fsdp_size,
        engine.ulysses_sequence_parallel_size,
        engine.tensor_parallel_size,
        engine.pipeline_parallel_size,
        engine.expert_parallel_size,
    )


def _meshes(config: SFTConfig, placement: Placement) -> Mapping[str, MeshInfo]:
    world = placement.num_devices
    cost = row_cost(config.model) if config.trainer.balance_batch else None
    learner, *others = roles_of(config)
    return {
        learner: MeshInfo(world, sizes(config, world).axes(), cost),
        **{role: MeshInfo(world) for role in others},
    }


def _factories(
    config: SFTConfig, total_steps: int, nonfinite: Path, ends: tuple[int, ...], process: WorkerHost
) -> Factories:
    model = model_arguments(config.model, resolve_device(config.trainer.device))
    lora = LoraSettings.from_config(config.model, seed=config.trainer.seed)

    kind = kind_of(config)

    def learner(info: RankInfo) -> SFTWorker | ComparisonWorker:
        with progress.phase("loading the model"):
            engine = build_engine(
                kind.engine(config),
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
                freeze_vision_tower=config.model.freeze_vision_tower,
                strategy=config.engine.strategy,
            )
        limits = BatchLimits(config.data.max_token_len_per_gpu, config.data.micro_batch_size_per_gpu)
        return kind.make_worker(config, engine, limits)

    def rollout(info: RankInfo) -> RolloutWorker:
        sharer = process.worker(kind.name)
        assert isinstance(sharer, SFTWorker)
        return build_rollout_worker(
            RolloutConfig(max_num_seqs=512),
            actor_engine=sharer.engine,
            model=model,
            eos_token_ids=ends,
            lora=lora,
        )

    made: Factories = {kind.name: learner, "rollout": rollout}
    return {role: made[role] for role in roles_of(config)}


COLUMN = "ref_log_prob_sum"


def add_reference(
    datasets: dict[str, PreferenceDataset],
    group: ComparisonGroup,
    folder: Path,
    make_rows: Callable[[Sequence[Comparison]], DataProto],
    *,
    batch_size: int,
    without_adapters: bool,
    settings: str,
) -> None:
    """Give each dataset, by the name of its split, the sums of the reference's log-probs.

    `folder` keeps them; those of other data, weights or `settings` of the model are replaced.
    """
    weights = group.call(ComparisonWorker.checksum)
    for split, dataset in datasets.items():
        place = folder / split
        key = f"{dataset.digest()} {weights} {settings}"
        found = _kept(place, key)
        if found is None:
            found = _computed(dataset, group, make_rows, batch_size, without_adapters)
            found.meta_info["key"] = key
            shutil.rmtree(place, ignore_errors=True)  # so that no kill leaves new sums under the old key
            found.save_to_disk(place)
        else:
            logger.info("log-probs of the reference for %s are those of %s", split, place)
        dataset.reference = found.batch[COLUMN].view(-1, 2)


def _kept(place: Path, key: str) -> DataProto | None:
    with suppress(DataError):
        found = DataProto.load_from_disk(place)
        if found.meta_info.get("key") == key:
            return found
    return None


def _computed(
    dataset: PreferenceDataset,
    group: ComparisonGroup,
    make_rows: Callable[[Sequence[Comparison]], DataProto],
    batch_size: int,
    without_adapters: bool,
) -> DataProto:
    starts = range(0, len(dataset), batch_size)
    sums = []
    for start in progress.each(starts, "batch", len(starts)):
        items = [dataset[index] for index in range(start, min(start + batch_size, len(dataset)))]
        rows = group.call(ComparisonWorker.log_prob_sums, make_rows(items), without_adapters=without_adapters)
        sums.append(rows.batch[COLUMN])
    return DataProto.from_dict({COLUMN: torch.cat(sums)})
