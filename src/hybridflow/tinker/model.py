"""The one base in memory: passes of adapters over rows, optimizer steps, and sampling, for one thread.

rows ──pack_targets──► PolicyModel with an adapter ──► log-probs, loss, gradients of this adapter alone
prompts ──────────────► NativeEngine on the same module ──► responses

Each training run has an adapter and an optimizer of its own; nothing of it is in the base.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridflow.config.model import OptimConfig
from hybridflow.data.tokenizer import load_tokenizer, text_of
from hybridflow.distributed.accelerators import is_accelerator
from hybridflow.engines.optimizer import MasterAdamW
from hybridflow.models.adapters.slots import Adapter, AdapterSlots
from hybridflow.models.attention.rope import longest_generated
from hybridflow.models.files.build import build_policy, generation_end_tokens
from hybridflow.protocol.packing import PackedBatch
from hybridflow.protocol.prompt import Prompt
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, SamplingParams
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.tinker.losses import TARGETS, check_inputs, loss_of
from hybridflow.tinker.wire import Datum, ForwardBackward, Refusal

logger = logging.getLogger(__name__)
ALPHA = 32
"""Numerator of an adapter's factor alpha / rank, whatever its rank: Tinker's."""
OPTIMIZER = "optimizer.safetensors"
LEAST_EPS = 1e-30
"""Smallest eps of AdamW; in float32 much smaller ones are zero."""


@dataclass(frozen=True)
class LoraSpec:
    """An adapter as it is asked for."""

    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one optimizer step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Largest norm of all gradients together; 0: they are not clipped."""

    def __post_init__(self) -> None:
        values = vars(self)
        if not all(math.isfinite(value) and value >= 0 for value in values.values()):
            raise Refusal(f"adam_params: {values}: wanted finite numbers of at least 0")
        if self.eps < LEAST_EPS or self.learning_rate > 1:
            raise Refusal(
                f"adam_params: learning_rate={self.learning_rate:g} and eps={self.eps:g}: wanted a learning "
                f"rate of at most 1, and eps of at least {LEAST_EPS:g}: where the gradient is zero, so is "
                "everything else that a step divides by"
            )
        if self.beta1 >= 1 or self.beta2 >= 1:
            raise Refusal(f"adam_params: beta1={self.beta1:g} and beta2={self.beta2:g}: wanted below 1")


@dataclass
class Trained:
    """A run's own weights and optimizer."""

    adapter: Adapter
    optimizer: MasterAdamW


@dataclass
class Sampling:
    """A request for responses to one prompt."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    count: int
    num_scored: int
    """The last tokens of the prompt whose log-probs are wanted."""
    finish: Callable[[Sampling, str | None], None] = field(init=False)
    """Called once, in the thread of the model, with the reason of a failure or None."""
    outputs: dict[int, GenerationOutput] = field(default_factory=dict)
    """By the number of the response."""
    prompt_log_probs: Tensor | None = None


class SharedBase:
    """The base with places for an adapter, and the engine that generates with it."""

    def __init__(
        self,
        folder: str,
        *,
        device: torch.device,
        dtype: str,
        pass_tokens: int,
        max_rows: int,
        memory_share: float,
    ) -> None:
        """Load the model; ModelError where that cannot be. `pass_tokens`: most tokens of a training pass,
        unless one row has more; `max_rows`: responses decoded together.
        """
        self.policy = build_policy(folder, device=device, dtype=dtype)
        self.slots = AdapterSlots(self.policy)
        self.pass_tokens = pass_tokens
        self.vocabulary = self.policy.head.weight.shape[0]
        self.positions = longest_generated(self.policy.config)
        self.engine = NativeEngine(
            self.policy,
            eos_token_ids=generation_end_tokens(folder),
            decode=partial(text_of, load_tokenizer(folder)),
            max_num_seqs=max_rows,
            gpu_memory_utilization=memory_share,
        )
        self._ids = itertools.count()

    def new_run(self, spec: LoraSpec) -> Trained:
        """Return a run with a new adapter."""
        return self._trained(
            self.slots.new_adapter(spec.rank, ALPHA, spec.seed, attention=spec.train_attn, mlp=spec.train_mlp)
        )

    def _trained(self, adapter: Adapter) -> Trained:
        return Trained(adapter, MasterAdamW(adapter.named_parameters(), OptimConfig()))

    def forward(self, run: Trained, request: ForwardBackward) -> tuple[list[Tensor], float]:
        """Return the log-probs of each row's targets, nats, in their shape, and the loss of all rows; add the
        gradients to the run's unless `forward_only`. Refusal for rows that cannot be read.
        """
        check_inputs(request.loss_fn, request.loss_fn_config, request.data)
        for place, row in enumerate(request.data):
            self.check_tokens(f"data[{place}].model_input", row.tokens)
            self.check_tokens(f"data[{place}].target_tokens", row.inputs[TARGETS].flatten())
        self._make_room()
        self.slots.use(run.adapter)
        log_probs: list[Tensor] = []
        total = 0.0
        try:
            for rows in self._passes(request.data):
                found, loss = self._one_pass(rows, request)
                log_probs += found
                total += loss
        except BaseException:
            run.optimizer.zero_grad()  # a part of a request's gradients is of no use
            raise
        return log_probs, total

    def _one_pass(self, rows: Sequence[Datum], request: ForwardBackward) -> tuple[list[Tensor], float]:
        packed = pack_targets(rows).to(self.policy.device)
        with torch.set_grad_enabled(not request.forward_only):
            found = self.policy(packed).log_probs
            loss = loss_of(request.loss_fn, request.loss_fn_config, packed.unpack(found), rows)
        if not request.forward_only:
            loss.backward()
        shapes = [row.inputs[TARGETS].shape for row in rows]
        parts = found.detach().split([shape.numel() for shape in shapes])
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)], float(loss.detach())

    def _passes(self, rows: Sequence[Datum]) -> Iterator[list[Datum]]:
        """Cut rows into passes of at most `pass_tokens` tokens, in their order."""
        part: list[Datum] = []
        size = 0
        for row in rows:
            tokens = max(len(row.tokens), row.inputs[TARGETS].numel())
            if part and size + tokens > self.pass_tokens:
                yield part
                part = []
                size = 0
            part.append(row)
            size += tokens
        yield part

    def check_tokens(self, what: str, tokens: Tensor, room: int = 0) -> None:
        """Raise Refusal for no tokens, tokens out of the vocabulary, or more than the model has positions for
        with `room` further ones.
        """
        if not len(tokens):
            raise Refusal(f"{what} is empty: send at least one token")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocabulary:
            raise Refusal(
                f"{what} has token ids from {low} to {high}, and the model's are 0..{self.vocabulary - 1}"
            )
        if what.endswith("target_tokens"):  # several may stand at one place
            return
        if self.positions is not None and len(tokens) + room > self.positions:
            raise Refusal(
                f"{what} has {len(tokens)} tokens, and {room} more are wanted: the model has "
                f"{self.positions} positions"
            )

    def step(self, run: Trained, adam: AdamStep) -> float:
        """Take one AdamW step with the gradients since the last one, drop them, and return their norm before
        clipping. Refusal, with nothing changed, where there are none, or where they or the weights that the
        step would make are not finite.
        """
        if run.optimizer.num_gradients == 0:
            raise Refusal("optim_step: there are no gradients: call forward_backward before it")
        norm = float(run.optimizer.gradient_norm())
        if not math.isfinite(norm):
            run.optimizer.zero_grad()
            raise Refusal(
                f"optim_step: the norm of the gradients is {norm}: they are dropped, no weight changed"
            )
        if 0 < adam.grad_clip_norm < norm:
            run.optimizer.scale_gradients(torch.tensor(adam.grad_clip_norm / (norm + 1e-6)))
        for rule in run.optimizer.rules:
            for group in rule.param_groups:
                group["betas"] = (adam.beta1, adam.beta2)
                group["eps"] = adam.eps
                group["weight_decay"] = adam.weight_decay
        parameters = [each for _, each in run.adapter.named_parameters()]
        weights = [each.detach().clone() for each in parameters]
        state = {
            name: {key: value.clone() for key, value in entry.items()}
            for name, entry in run.optimizer.state_dict().items()
        }
        run.optimizer.step(adam.learning_rate)
        run.optimizer.zero_grad()
        if not all(bool(each.isfinite().all()) for each in parameters):
            with torch.no_grad():
                for parameter, kept in zip(parameters, weights, strict=True):
                    parameter.copy_(kept)
            run.optimizer.load_state_dict(state)
            raise Refusal(
                f"optim_step: with {vars(adam)} the weights would not be finite: they stay as they were, and "
                "the gradients are dropped"
            )
        return norm

    def write(self, run: Trained, folder: Path, *, optimizer: bool) -> None:
        """Write the adapter in peft's format and, if asked, the optimizer's state."""
        self.slots.write(run.adapter, folder)
        if optimizer:
            state = run.optimizer.state_dict()
            flat = {f"{name}/{key}": value for name, entry in state.items() for key, value in entry.items()}
            save_file(
                {name: value.detach().cpu().contiguous() for name, value in flat.items()}, folder / OPTIMIZER
            )

    def read(self, folder: Path, *, optimizer: bool) -> Trained:
        """Return the run that a folder holds, with a new optimizer unless its state is asked for."""
        run = self._trained(self.slots.read(folder, trains=True))
        if optimizer:
            if not (folder / OPTIMIZER).is_file():
                raise Refusal("this checkpoint has no optimizer state: it was saved for sampling")
            state: dict[str, dict[str, Any]] = {}
            for name, value in load_file(folder / OPTIMIZER).items():
                parameter, _, key = name.rpartition("/")
                state.setdefault(parameter, {})[key] = value
            run.optimizer.load_state_dict(state)
        return run

    def sample(self, adapter: Adapter | None, version: int, take: Callable[[], Iterable[Sampling]]) -> None:
        """Serve the requests that `take` gives, and those that it gives between two steps, until all are
        done. A prompt that cannot be scored fails its own request; an error of the engine fails all that
        are not done. Weights of one `version` are the same.
        """
        self.engine.wake_up()
        self.slots.use(adapter)
        self.engine.set_version(version)
        running: dict[int, tuple[Sampling, int]] = {}
        taken: list[Sampling] = []
        session = self.engine.open()
        try:
            while True:
                outputs: list[GenerationOutput] = []
                new = list(take())
                taken += new
                for asked in new:
                    try:
                        asked.prompt_log_probs = self._score(asked)
                    except Exception as error:
                        logger.exception("the log-probs of a prompt failed")
                        asked.finish(asked, f"the prompt's log-probs: {type(error).__name__}: {error}")
                        continue
                    requests = self._requests(asked)
                    running.update({each.request_id: (asked, place) for place, each in enumerate(requests)})
                    outputs += session.add(requests)
                if not running:
                    return
                _deliver(running, [*outputs, *(session.step() if not session.idle else ())])
        except Exception as error:
            for asked in taken:  # those that are done stay as they are
                asked.finish(asked, f"the engine failed: {type(error).__name__}: {error}")
            raise
        finally:
            session.close()

    def _requests(self, asked: Sampling) -> list[GenerationRequest]:
        prompt = Prompt(asked.prompt)
        return [
            GenerationRequest(
                next(self._ids), prompt, asked.sampling, derive_seed(asked.seed, "tinker", place)
            )
            for place in range(asked.count)
        ]

    @torch.no_grad()
    def _score(self, asked: Sampling) -> Tensor | None:
        """Return log-probs [P] of the prompt's tokens, NaN for the first and those that are not wanted."""
        if not asked.num_scored:
            return None
        tokens = torch.tensor(asked.prompt)
        scores = torch.full((len(tokens),), math.nan)
        if len(tokens) > 1:
            row = Datum(tokens[:-1], {TARGETS: tokens[1:]})
            scores[1:] = self.policy(pack_targets([row]).to(self.policy.device)).log_probs.float().cpu()
            scores[: max(1, len(tokens) - asked.num_scored)] = math.nan
        return scores

    def _make_room(self) -> None:
        """Give the memory of keys and values back before a training pass, where it is a device's."""
        if is_accelerator(self.policy.device.type):
            self.engine.sleep()


def _deliver(running: dict[int, tuple[Sampling, int]], outputs: Iterable[GenerationOutput]) -> None:
    for output in outputs:
        asked, place = running.pop(output.request_id)
        asked.outputs[place] = output
        if len(asked.outputs) == asked.count:
            asked.finish(asked, next((each.error for each in asked.outputs.values() if each.error), None))


def pack_targets(rows: Sequence[Datum]) -> PackedBatch:
    """Return rows as one batch in which the token at each place predicts its targets, in flat order."""
    lengths = tuple(len(row.tokens) for row in rows)
    starts = [0, *itertools.accumulate(lengths)][:-1]
    sizes = [row.inputs[TARGETS].numel() for row in rows]
    index = torch.cat(
        [
            start + torch.arange(length).repeat_interleave(size // length)
            for start, length, size in zip(starts, lengths, sizes, strict=True)
        ]
    )
    places = None
    if sum(sizes) != sum(lengths):  # a place with several targets is one that several responses share
        places = torch.arange(sum(lengths))
    return PackedBatch(
        input_ids=torch.cat([row.tokens for row in rows]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        lengths=lengths,
        prompt_lengths=(1,) * len(rows),
        predict_index=index,
        predict_index_on_cpu=index,
        targets=torch.cat([row.inputs[TARGETS].flatten() for row in rows]),
        rows=torch.arange(len(rows)).repeat_interleave(torch.tensor(sizes)),
        columns=torch.cat([torch.arange(size) for size in sizes]),
        shape=(len(rows), max(sizes)),
        places=places,
    )
