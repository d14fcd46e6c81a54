"""The one place that wires a supervised run: a prepared configuration in, a trainer ready to `fit` out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.config import SFTConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.config.show import to_yaml
from hybridflow.controller import LocalBackend, RankInfo
from hybridflow.data.build import build_sft_data
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.distributed.device import resolve_device, set_threads
from hybridflow.engines import BatchLimits
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.models.build import build_policy
from hybridflow.models.export import save_config, save_hf
from hybridflow.observability.timing import Timer
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.trainer.models import end_tokens, model_arguments
from hybridflow.trainer.resume import say_changes
from hybridflow.trainer.run_folder import RunFolder
from hybridflow.trainer.run_trackers import run_trackers
from hybridflow.trainer.sft.state import SFTState
from hybridflow.trainer.sft.trainer import SFTTrainer
from hybridflow.workers.sft import SFTGroup, SFTWorker


@contextmanager
def build(config: SFTConfig) -> Iterator[SFTTrainer]:
    """Everything a supervised run needs; files and the run folder are let go at the end, whatever happens."""
    set_threads(config.trainer.num_threads)
    folder = RunFolder(config.trainer.default_local_dir)
    with folder.held():
        yield from _build(config, folder)


def _build(config: SFTConfig, folder: RunFolder) -> Iterator[SFTTrainer]:
    trainer = config.trainer
    changed = folder.write_config(to_yaml(config))
    tokenizer = load_tokenizer(str(config.data.tokenizer), config.data.trust_remote_code)
    data = build_sft_data(config.data, tokenizer, trainer.seed)
    total_steps = trainer.total_training_steps or len(data.train_loader) * trainer.total_epochs
    policy = build_policy(**model_arguments(config.model, resolve_device(trainer.device)))

    def worker(info: RankInfo) -> SFTWorker:
        engine = FSDPEngine(
            policy,
            name="train",
            optim=config.optim,
            total_steps=total_steps,
            grad_clip=trainer.grad_clip,
            max_nonfinite_steps=trainer.max_nonfinite_steps,
            dump_dir=folder.nonfinite,
        )
        return SFTWorker(engine, BatchLimits(config.data.max_token_len_per_gpu, config.data.micro_batch_size_per_gpu))

    def write_huggingface(target: Path, with_weights: bool) -> None:
        (save_hf if with_weights else save_config)(policy, target, tokenizer)

    group = SFTGroup(LocalBackend(lambda host: {"sft": worker}), "sft")
    state = SFTState(group, data.train_loader, config.checkpoint, write_huggingface, total_steps, trainer.seed)
    store = CheckpointStore(folder.path, keep=trainer.max_ckpt_to_keep)
    done = state.resume(store, trainer.resume_mode, trainer.resume_from_path)
    say_changes(done, changed)
    assert tokenizer.pad_token_id is not None, "the tokenizer loader sets a pad token"
    with run_trackers(config, folder, total_steps, done) as trackers:
        yield SFTTrainer(
            config=config,
            group=group,
            loader=data.train_loader,
            validation=data.val_dataset,
            state=state,
            store=store,
            trackers=trackers,
            timer=Timer(),
            total_steps=total_steps,
            tokenizer=tokenizer,
            export=lambda target: write_huggingface(target, True),
            rollout=build_rollout_engine(RolloutConfig(max_num_seqs=512), policy, end_tokens(policy, tokenizer)),
        )
