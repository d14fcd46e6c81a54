"""The engine of a model in megatron-core: its layers, its pipeline schedule, its distributed optimizer.

    rows ──plan──► micro-batches ──its schedule──► stages ──last one──► outputs ──loss──► gradients
    ──reduced by its data parallelism──► its optimizer

`module` is the Hugging Face policy or value model on the meta device: it says names, vocabulary and
architecture, and has no memory. What leaves the engine (weights to generate with, checkpoints, exports) has
Hugging Face names and boxes (`hf_weights`), as that of every other engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from itertools import tee
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

from hybridflow.config.model import OptimConfig
from hybridflow.distributed.layout import ParallelLayout
from hybridflow.distributed.mesh import EngineMesh
from hybridflow.distributed.process_group import rank_and_size, timeout_s
from hybridflow.distributed.shards import is_absent, local, piece_for
from hybridflow.engines.base import Held, LossFn
from hybridflow.engines.megatron import on_cpu
from hybridflow.engines.megatron.hf_weights import HFWeights
from hybridflow.engines.megatron.network import build_network, check_family
from hybridflow.engines.megatron.optimizer import MOMENTS, DistributedAdamW
from hybridflow.engines.megatron.parallel_head import HeadCut, parallel_log_probs
from hybridflow.engines.micro_batch_engine import Accumulated, MicroBatchEngine
from hybridflow.engines.micro_batches import MicroBatch
from hybridflow.errors import CheckpointError, ModelError
from hybridflow.models.files.export import save_config, save_hf_sharded
from hybridflow.models.files.sharded_load import MetaModel, load_weights
from hybridflow.models.heads.log_probs import TokenOutputs, token_log_probs
from hybridflow.models.output_spec import Outputs, OutputSpec
from hybridflow.models.parallel.sequence_parallel import SequenceCut
from hybridflow.models.policy import PolicyModel, sequence_cut
from hybridflow.models.value import ValueModel
from hybridflow.protocol.packing import PackedBatch

_sizes: dict[str, int] = {}
"""The parallel sizes that megatron-core has made its groups for, in this process; it has one of each."""


def join_groups(layout: ParallelLayout, parts: int, device: torch.device) -> None:
    """Make megatron-core's process groups for `layout` with `parts` of each stage, which all models of a
    process share.

    All ranks call it together. Raises ModelError for a second layout.
    """
    sizes = {
        "tensor": layout.tp,
        "pipeline": layout.pp,
        "virtual pipeline": parts,
        "sequence": layout.cp,
        "expert": layout.ep,
    }
    if device.type == "cpu":
        on_cpu.speak_of_the_cpu()
    if parallel_state.model_parallel_is_initialized():
        if _sizes and _sizes != sizes:
            raise ModelError(
                f"strategy=megatron: this process trains with parallel sizes {_sizes}, and another of its "
                f"models asks for {sizes}; megatron-core has one layout in a process: make them equal"
            )
        return
    _sizes.update(sizes)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=parts if parts > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=max(1, math.ceil(timeout_s() / 60)),
        create_gloo_process_groups=False,
    )


class MegatronEngine(MicroBatchEngine):
    """A `TrainEngine` whose model is a stage of megatron-core's decoder.

    `meta` is the policy or value model on the meta device and the files of its weights; the layout is that of
    `mesh`, with `parts` of the model on each stage. Ranks that share rows attend in a ring, or else by heads.
    The others are those of `MicroBatchEngine`. All ranks build it together.
    """

    def __init__(
        self,
        meta: MetaModel,
        *,
        mesh: EngineMesh,
        device: torch.device,
        optim: OptimConfig | None,
        recompute: bool,
        ring: bool,
        parts: int,
        **settings: Any,
    ) -> None:
        check_family(meta.config, mesh.layout, parts)
        join_groups(mesh.layout, parts, device)
        self.module = meta.module
        if isinstance(self.module, PolicyModel):
            self.module.is_sharded = True
        self.module.column = mesh.column
        self.parts = [
            build_network(
                meta.module, mesh.layout, meta.dtype, device, recompute=recompute, part=part, parts=parts
            )
            for part in range(parts)
        ]
        if parts > 1:  # in its interleaved schedule micro-batches go round in groups as large as the stages
            self.multiple_of = mesh.layout.pp
        self.dtype = meta.dtype
        self.ring = ring
        self.weights = HFWeights(self.module, self.parts, mesh)
        optimizer: DistributedAdamW | None = None
        if optim is None:
            for part in self.parts:
                part.requires_grad_(False)
            self._load_files(meta)
        else:
            settings_of_ddp = DistributedDataParallelConfig(
                use_distributed_optimizer=True, grad_reduce_in_fp32=True
            )
            ddps = [DistributedDataParallel(part.config, settings_of_ddp, part) for part in self.parts]
            self._load_files(meta)
            optimizer = DistributedAdamW(ddps, optim, meta.dtype)
            self.parts[0].config.finalize_model_grads_func = _finalize
        super().__init__(mesh=mesh, device=device, optim=optim, optimizer=optimizer, **settings)
        self.adamw = optimizer

    @torch.no_grad()
    def _load_files(self, meta: MetaModel) -> None:
        """Fill the stage from the files."""
        with self._filled(written=True):
            if isinstance(self.module, ValueModel) and "head.weight" not in meta.sources:
                for parameter in self.module.head.parameters():
                    nn.init.zeros_(parameter)
            load_weights(meta)

    @contextmanager
    def _filled(self, *, written: bool = False) -> Iterator[None]:
        """Give the module this rank's parts as its parameters; `written` puts them back into the stage."""
        known = dict(self.module.named_parameters())
        parts = dict(self._parts())
        if written:  # in memory of their own, which does not overlap with that of the stage
            parts = {name: torch.empty_like(part) for name, part in parts.items()}
        made = {id(known[name]): nn.Parameter(part, requires_grad=False) for name, part in parts.items()}
        before = [(owner, dict(owner._parameters)) for owner in self.module.modules()]
        try:
            for owner, parameters in before:
                owner._parameters.update(
                    {name: made[id(each)] for name, each in parameters.items() if each is not None}
                )
            yield
        finally:
            for owner, parameters in before:
                owner._parameters.update(parameters)
        if written:
            for name, piece in self.weights.pieces.items():
                if piece.sources:
                    piece.write(self._parameter, local(made[id(known[name])]))

    def _parameter(self, name: str) -> Tensor:
        return self.weights.parameters[name]

    def _parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each parameter of the module by name, placed in the whole."""
        for name, piece, part in self.weights.read(self._parameter, self.dtype):
            yield name, piece.placed(part)

    def _forward_all(
        self, micros: Sequence[MicroBatch], spec: OutputSpec
    ) -> Iterator[tuple[MicroBatch, Outputs]]:
        found: list[Outputs] = []

        def keep(outputs: Outputs, micro: MicroBatch) -> Tensor:
            found.append(outputs)
            return torch.zeros((), device=self.device)

        self._run(micros, spec, keep, forward_only=True)
        for number, micro in enumerate(micros):
            if found:
                yield micro, found[number]
            else:  # dispatch takes the answers from the last stage
                names = [each.name for each in fields(spec) if getattr(spec, each.name) is True]
                yield (
                    micro,
                    {name: torch.zeros(len(micro.packed.targets), device=self.device) for name in names},
                )

    def _accumulate(
        self, micros: Sequence[MicroBatch], spec: OutputSpec, loss: LossFn, sums: Accumulated
    ) -> None:
        self._run(micros, spec, lambda outputs, micro: sums.share(micro, outputs, loss), forward_only=False)

    def _run(
        self, micros: Sequence[MicroBatch], spec: OutputSpec, share_of: Any, *, forward_only: bool
    ) -> None:
        """Pass micro-batches through the stages by megatron-core's schedule.

        Where the last stage is, `share_of` gets outputs and micro-batch and returns a share of the loss.
        """
        self._refuse(spec)
        assert self.mesh is not None
        group = self.mesh.sequence_group
        count = torch.zeros((), dtype=torch.int, device=self.device)

        def step(moved: Iterator[MicroBatch], model: nn.Module) -> tuple[Tensor, Any]:
            micro = next(moved)
            packed = self.parts[0].evened(micro.packed)
            cut = sequence_cut(packed, group, self.module.config, self.ring)
            states = get_attr_wrapped_model(model, "rows_forward")(packed, cut)

            def loss(states: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                return share_of(self._outputs(states, packed, cut, spec), micro), count, {}

            return states, loss

        for part in self.parts:
            part.train(not forward_only)
        moved = (micro.on(self.device) for micro in micros)
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=list(tee(moved, len(self.parts))),
            model=self.parts if self.adamw is None else self.adamw.ddps,
            num_microbatches=len(micros),
            seq_length=1,  # lengths vary: stages tell each other shapes
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _refuse(self, spec: OutputSpec) -> None:
        served = spec == OutputSpec(values=True)
        if isinstance(self.module, PolicyModel):
            served = spec.log_probs and not (spec.values or spec.scores or spec.routes or spec.full_kl)
        assert served, (
            "the keys of a run with strategy=megatron ask a policy for log-probs, entropies and Σπ², and a "
            f"value model for values, not for {spec}"
        )

    def _outputs(
        self, states: Tensor, packed: PackedBatch, cut: SequenceCut | None, spec: OutputSpec
    ) -> Outputs:
        """Return the outputs [M] of the last stage for its states [P, 1, H]."""
        index = packed.predict_index
        targets = packed.targets
        if cut is not None:
            index = cut.predict_index
            targets = targets[cut.own]
        chosen = states[:, 0].index_select(0, index)
        if cut is not None:
            chosen = cut.deal(chosen)
        if isinstance(self.module, ValueModel):
            head = self.parts[-1].value_head
            values: Tensor = head(chosen.to(head.weight.dtype))[:, 0]
            if cut is not None:
                (values,) = cut.gather([values])
            return {"values": values}
        weight = self.parts[-1].head_weight
        if self.layout.tp > 1:
            first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
            count = max(0, min(len(weight), self.vocabulary - first))
            own = HeadCut(parallel_state.get_tensor_model_parallel_group(), first, count)
            found: TokenOutputs = parallel_log_probs(chosen, weight, targets, spec, own)
        else:
            found = token_log_probs(
                chosen,
                weight,
                None,
                targets,
                temperature=spec.temperature,
                with_entropy=spec.entropy,
                with_sum_pi_squared=spec.sum_pi_squared,
            )
        if cut is not None:
            found = cut.gather_outputs(found)
        return {name: value for name, value in found._asdict().items() if value is not None}

    def _measure(self, sums: Accumulated) -> tuple[float, Tensor]:
        assert self.adamw is not None and self.mesh is not None
        loss = sums.loss if self.mesh.returns else torch.zeros_like(sums.loss)
        dist.all_reduce(loss)
        return float(loss), self.adamw.gradient_norm()

    @property
    def policy(self) -> PolicyModel:
        """The policy on the meta device; its parameters have no memory."""
        assert isinstance(self.module, PolicyModel), f"the model of {self.name} is no policy"
        return self.module

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the model over the ranks that hold it together."""
        assert self.mesh is not None
        return self.mesh.layout

    @property
    def vocabulary(self) -> int:
        """Number of rows of the policy's head."""
        return int(self.policy.head.weight.shape[0])

    def held_weights(self) -> Iterator[Held]:
        """See `TrainEngine.held_weights`; parts that megatron-core keeps joined with others are copies."""
        for name, piece, part in self.weights.read(self._parameter, self.dtype):
            tensor = part if piece.sources else torch.empty(0)
            yield Held(name, piece.shape, piece.box, tensor, self.dtype, self.optim is not None)

    def readable_policy(self) -> AbstractContextManager[None]:
        """See `TrainEngine.readable_policy`; parts that megatron-core keeps joined with others are copied."""
        return self._filled()

    def without_adapters(self) -> AbstractContextManager[None]:
        """See `TrainEngine.without_adapters`; there are none."""
        raise AssertionError(f"the model of {self.name} has no adapters to leave out")

    def export_hf(self, folder: str | Path, *, with_weights: bool = True) -> None:
        """See `TrainEngine.export_hf`."""
        target = Path(folder)
        if with_weights:
            with self._filled():
                save_hf_sharded(self.policy, target, dtype=self.policy.source_dtype)
        elif rank_and_size()[0] == 0:
            save_config(self.policy, target)

    @property
    def is_offloaded(self) -> bool:
        """False: the parameters stay on the device."""
        return False

    def onload(self) -> None:
        """Do nothing: the parameters are on the device."""

    def offload(self) -> None:
        """Do nothing: the parameters stay on the device."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of model, optimizer and counters, by Hugging Face names, as the other engines do.

        All ranks call it together. Parts are copies, those of the optimizer in main memory.
        """
        first: dict[int, Tensor] = {}
        known = dict(self.module.named_parameters())
        for name, part in self._parts():
            first[id(known[name])] = part
        model = {
            name: first.get(id(tensor), tensor)
            for name, tensor in self.module.state_dict(keep_vars=True).items()
        }
        return {
            "model": model,
            "optimizer": {} if self.adamw is None else self._moments(self.adamw),
            "scheduler": {"num_steps": self.num_steps, "nonfinite_in_a_row": self.guard.in_a_row},
        }

    def _moments(self, adamw: DistributedAdamW) -> dict[str, Any]:
        whole = adamw.whole_state()
        step = torch.tensor(float(adamw.num_steps))
        rounded = {name for name, each in self.module.named_parameters() if each.dtype != torch.float32}
        found: dict[str, dict[str, Tensor]] = {name: {"step": step.clone()} for name in self.weights.pieces}
        for kind in (*MOMENTS, "master"):
            for name, piece, part in self.weights.read(whole[kind].__getitem__, torch.float32):
                if kind in MOMENTS or name in rounded:
                    found[name][kind] = piece.placed(part.contiguous())
        return found

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the given parts of a `state_dict` of this engine or of another one, in place."""
        if "model" in state:
            self._load_model(state["model"])
        if self.adamw is not None:
            self.adamw.refresh()
            if "optimizer" in state:
                self._load_moments(state["optimizer"], self.adamw)
        if "scheduler" in state:
            self.num_steps = int(state["scheduler"]["num_steps"])
            self.guard.in_a_row = int(state["scheduler"]["nonfinite_in_a_row"])

    def _load_model(self, saved: dict[str, Tensor]) -> None:
        own = {name: tuple(each.shape) for name, each in self.module.state_dict(keep_vars=True).items()}
        theirs = {name: tuple(each.shape) for name, each in saved.items()}
        if own != theirs:
            odd = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))[:3]
            raise CheckpointError(
                f"The checkpoint's model has other parameters than this {self.name}, for example "
                f"{[(name, theirs.get(name)) for name in odd]} in the place of "
                f"{[own.get(name) for name in odd]}."
            )
        for name, part in self._pieces_of(saved):
            self.weights.pieces[name].write(self._parameter, part)

    def _load_moments(self, saved: dict[str, dict[str, Tensor]], adamw: DistributedAdamW) -> None:
        wanted = {"step", *MOMENTS}
        if saved.keys() != self.weights.pieces.keys():
            odd = sorted(saved.keys() ^ self.weights.pieces.keys())[:3]
            raise CheckpointError(
                f"The checkpoint's optimizer is for other parameters than this model's, for example {odd}."
            )
        for name, entry in saved.items():
            if entry.keys() - {"master"} != wanted:
                raise CheckpointError(
                    f"The checkpoint's optimizer has {', '.join(sorted(entry))} of {name}, and AdamW keeps "
                    f"{', '.join(sorted(wanted))}: set optim.optimizer to the checkpoint's with "
                    "strategy=fsdp2, or leave optimizer out of checkpoint.load_contents"
                )
        state: dict[str, dict[str, Tensor]] = {}
        for kind in ("master", *MOMENTS):
            # rows that only pad the vocabulary have no moments
            whole = {name: each.detach().float() for name, each in self.weights.parameters.items()}
            if kind in MOMENTS:
                whole = {name: torch.zeros_like(each) for name, each in whole.items()}
            columns = {name: entry[kind] for name, entry in saved.items() if kind in entry}
            for name, part in self._pieces_of(columns):
                self.weights.pieces[name].write(whole.__getitem__, part)
            state[kind] = whole
        steps = {int(entry["step"]) for entry in saved.values()}
        adamw.load(state, max(steps, default=0))

    def _pieces_of(self, saved: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each saved tensor that it holds; all ranks read them together."""
        for name, piece in self.weights.pieces.items():
            if name in saved and piece.sources and not is_absent(saved[name]):
                like = piece.placed(torch.empty(piece.box.shape))
                yield name, piece_for(like, saved[name])


def _finalize(ddps: list[DistributedDataParallel], num_tokens: Any, **others: Any) -> None:
    """Complete the gradients over all ranks; shares of the loss are normalised, so nothing is divided."""
    finalize_model_grads(ddps, None, **others)
