"""The engine of a model that is whole on its rank, or sharded over ranks by FSDP2 (`sharding`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridflow.config.model import FSDPConfig, OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.mesh import EngineMesh
from hybridflow.distributed.process_group import rank_and_size
from hybridflow.distributed.shards import is_absent, local, piece_for, placed_like
from hybridflow.engines.base import Held, LossFn
from hybridflow.engines.expert_load import ExpertLoad
from hybridflow.engines.fsdp.offload import ActivationOffload, Offloader
from hybridflow.engines.fsdp.sharding import before_micro_batch, held_weights, reshard
from hybridflow.engines.micro_batch_engine import Accumulated, MicroBatchEngine
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.engines.optimizer import MasterAdamW
from hybridflow.errors import CheckpointError
from hybridflow.models.adapters.dropout import TokenKeys
from hybridflow.models.adapters.lora import adapters_off, has_adapters, saved_names
from hybridflow.models.blocks import tables_and_heads
from hybridflow.models.files.export import save_config, save_hf, save_hf_sharded
from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.models.outputs import outputs_of
from hybridflow.models.policy import PolicyModel
from hybridflow.models.score import ScoreModel
from hybridflow.models.value import ValueModel
from hybridflow.observability.progress import progress
from hybridflow.protocol.packing import PackedBatch
from hybridflow.stop_token import stop_token


class FSDPEngine(MicroBatchEngine):
    """A `TrainEngine` over a whole or an FSDP2-sharded module.

    With a `mesh`, `module` is sharded over it, from `root` on, and computes on `device`; `compute_dtypes` has
    the dtypes in which parameters are gathered that are narrower than their shards, by name. The others are
    those of `MicroBatchEngine`.
    """

    optimizer: MasterAdamW | None

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        optim: OptimConfig | None,
        total_steps: int = 0,
        grad_clip: float | None = None,
        max_nonfinite_steps: int = 3,
        dump_dir: Path | None = None,
        fsdp: FSDPConfig = FSDPConfig(),  # noqa: B008  (frozen)
        mesh: EngineMesh | None = None,
        device: torch.device | None = None,
        compute_dtypes: Mapping[str, torch.dtype] | None = None,
        activations: ActivationOffload | None = None,
        root: nn.Module | None = None,
    ) -> None:
        self.module = module
        self.root = root or module
        """The module whose forward is called, and at which sharding begins."""
        self.fsdp = fsdp
        self.compute_dtypes = compute_dtypes or {}
        self.activations = activations
        self.dropout = TokenKeys.of(module)
        """What adapters drop in updates, or None where they drop nothing."""
        optimizer: MasterAdamW | None = None
        if optim is not None:
            optimizer = MasterAdamW(
                module.named_parameters(),
                optim,
                compute_dtypes=self.compute_dtypes,
                apart=tables_and_heads(module),
                in_stages=mesh is not None and mesh.column is not None,
            )
        device = device or next(module.parameters()).device
        super().__init__(
            name=name,
            device=device,
            optim=optim,
            optimizer=optimizer,
            total_steps=total_steps,
            grad_clip=grad_clip,
            max_nonfinite_steps=max_nonfinite_steps,
            dump_dir=dump_dir,
            mesh=mesh,
        )
        self.offloader = Offloader(self.root, optimizer, device, fsdp)

    @contextmanager
    def _ready(self, *, training: bool) -> Iterator[None]:
        self.root.train(training)
        with self.offloader.parameters(), ExitStack() as stack:
            if training:
                stack.enter_context(self.offloader.masters())
            if self.dropout is not None:
                stack.callback(self.dropout.clear)
            yield

    def _forward_all(
        self, micros: Sequence[MicroBatch], spec: OutputSpec
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        for micro in progress.each(micros, "micro-batch", len(micros)):
            stop_token.check()
            yield micro, outputs_of(self.module, micro.on(self.device, with_rows=False).packed, spec)
        reshard(self.root)

    def _accumulate(
        self, micros: Sequence[MicroBatch], spec: OutputSpec, loss: LossFn, sums: Accumulated
    ) -> None:
        load = ExpertLoad.of(self.module, micros, self.mesh)
        for number, planned in enumerate(progress.each(micros, "micro-batch", len(micros)), start=1):
            micro = planned.on(self.device)
            if self.mesh is not None:
                last = number == len(micros)
                before_micro_batch(self.module, last=last, keep_gathered=not self.fsdp.reshard_after_forward)
            if self.dropout is not None:
                self.choose_dropout(micro.packed)
            with self.activations_kept():
                answers = outputs_of(self.module, micro.packed, spec)
            share = sums.share(micro, answers, loss)
            if load is not None:
                share = share + load.add(counts=micro.rows is not None)
            share.backward()
        reshard(self.root)
        if load is not None:
            load.add_to(sums.metrics, self.name)

    def choose_dropout(self, packed: PackedBatch) -> None:
        """Let adapters drop their part of the inputs in the next passes, which are over `packed`."""
        assert self.dropout is not None and isinstance(self.module, (PolicyModel, ValueModel))
        self.dropout.choose(self.module, packed, self.num_steps)

    def _apply(self, lr: float) -> None:
        with self.offloader.moments():
            super()._apply(lr)

    @property
    def policy(self) -> PolicyModel:
        """The module, which is a policy; its parameters may be shards."""
        assert isinstance(self.module, PolicyModel), f"the model of {self.name} is no policy"
        return self.module

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the model over the ranks that hold it together."""
        if self.mesh is None:
            return ParallelLayout()
        return self.mesh.layout

    @property
    def vocabulary(self) -> int:
        """Number of rows of the policy's head."""
        return int(self.policy.head.weight.shape[0])

    def held_weights(self) -> Iterator[Held]:
        """See `TrainEngine.held_weights`."""
        reshard(self.root)
        return held_weights(self.module, self.compute_dtypes)

    def readable_policy(self) -> AbstractContextManager[None]:
        """See `TrainEngine.readable_policy`; they always are, once blocks are resharded."""
        return nullcontext()

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `TrainEngine.without_adapters`."""
        assert has_adapters(self.module), f"the model of {self.name} has no adapters to leave out"
        return adapters_off(self.module)

    def export_hf(self, folder: str | Path, *, with_weights: bool = True) -> None:
        """See `TrainEngine.export_hf`."""
        model = self.module
        assert isinstance(model, (PolicyModel, ScoreModel)), f"the model of {self.name} has no form in files"
        target = Path(folder)
        dtype = model.source_dtype
        if not with_weights:
            if rank_and_size()[0] == 0:
                save_config(model, target)
            return
        with self.offloader.parameters():
            if dist.is_initialized():
                save_hf_sharded(model, target, dtype=dtype, dtypes=self.compute_dtypes)
            else:
                save_hf(model, target, dtype=dtype)

    @property
    def is_offloaded(self) -> bool:
        """Whether the parameters are offloaded to CPU memory between phases (`fsdp_config.param_offload`)."""
        return self.offloader.moves_parameters

    def onload(self) -> None:
        """Bring the parameters to the device, for a reader outside of this engine's own calls."""
        self.offloader.onload()

    def offload(self) -> None:
        """Undo one `onload`; the last one sends the parameters back to CPU memory, if they are offloaded."""
        self.offloader.offload()

    def activations_kept(self) -> AbstractContextManager[None]:
        """Return a context for a forward pass, in which activations are offloaded where that is asked for."""
        if self.activations is None:
            return nullcontext()
        return self.activations.kept()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of module, optimizer and counters; of a model with adapters only what is trained.

        Sharded tensors are DTensors, and everything else is equal on all ranks.
        """
        model = self._model()
        rounded: dict[int, Tensor] = {}  # tied parameters stay one tensor
        for key, dtype in self.compute_dtypes.items():
            shard = local(model[key])
            if shard.is_meta:
                model[key] = shard.to(dtype)
                continue
            if shard.data_ptr() not in rounded or shard.numel() == 0:
                rounded[shard.data_ptr()] = placed_like(shard.to(dtype), model[key])
            model[key] = rounded[shard.data_ptr()]
        optimizer: dict[str, Any] = {}
        if self.optimizer is not None:
            optimizer = self.optimizer.state_dict()
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": {"num_steps": self.num_steps, "nonfinite_in_a_row": self.guard.in_a_row},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the given parts of `state_dict()`, in place, for every user of the module."""
        if "model" in state:
            self._load_module(state["model"])
        if self.optimizer is not None:
            if "optimizer" in state:
                self.optimizer.load_state_dict(state["optimizer"])
            else:
                self.optimizer.copy_from_parameters()
        if "scheduler" in state:
            self.num_steps = int(state["scheduler"]["num_steps"])
            self.guard.in_a_row = int(state["scheduler"]["nonfinite_in_a_row"])

    def _model(self) -> dict[str, Tensor]:
        """Return the module's state without the base of adapters, which stays as it is in its own folder."""
        state = self.module.state_dict()
        names = saved_names(self.module)
        return {name: tensor for name, tensor in state.items() if names is None or name in names}

    def _load_module(self, saved: dict[str, Tensor]) -> None:
        own = self._model()
        if set(own) != set(saved):
            odd = sorted(set(own) ^ set(saved))[:3]
            raise CheckpointError(
                f"The checkpoint's model has other parameters than this {self.name}, for example {odd}."
            )
        for key, value in saved.items():
            if own[key].shape != value.shape:
                raise CheckpointError(
                    f"{self.name}: {key} is {tuple(value.shape)} in the checkpoint and "
                    f"{tuple(own[key].shape)} here."
                )
        for key, value in saved.items():
            if not is_absent(own[key]):
                local(own[key]).copy_(piece_for(own[key], value))
