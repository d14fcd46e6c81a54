"""The hf engine: transformers' `generate` behind the protocol of all engines. It is slow and simple, and
the other engines are tested against it.

    HFSession ──batches of `max_num_seqs`, left-padded──► transformers' generate ──► rows, when it is done

It drives the module it is given with transformers' own attention, which it switches on for the call and off
again. So it can share the module that trains, and it runs models that our attention refuses. A model that
says other things of a padded row in a batch (recurrent ones that take no mask) gets one row at a time. A step
of a session is a whole batch: requests that join wait for its end.

    logits [B, V] ──Batch.__call__──► tokens chosen and recorded ──► scores that leave `generate` no other
    choice ──Batch.ended──► [B] bool

`generate` runs the model and keeps its cache; every choice is made here, so a request's random numbers are
its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from hybridflow.models.attention.rope import longest_generated
from hybridflow.models.files.probe import difference, probe_tolerance
from hybridflow.protocol.prompt import token_ids_of
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, PartialOutput, WeightSource
from hybridflow.rollout.hf.row import HFRow
from hybridflow.rollout.memory import give_back
from hybridflow.rollout.native.responses import Decode, StopTexts
from hybridflow.rollout.native.sampling import sampling_problem
from hybridflow.rollout.session_engine import (
    SessionEngine,
    aborted,
    check_ids,
    load_weights,
    request_problem,
    sort_out,
)

logger = logging.getLogger(__name__)


class Batch(LogitsProcessor):
    """The rows of one `generate`; `abort` may come from another thread."""

    def __init__(
        self, rows: Sequence[HFRow], *, version: Callable[[], int], texts: StopTexts | None, filler: int
    ) -> None:
        self.rows = rows
        self._version = version
        self._texts = texts
        self.filler = filler
        self._lock = Lock()
        self.steps = 0

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Choose each unfinished row's next token; returns scores [B, V] that leave `generate` only that."""
        with self._lock:
            going = [index for index, row in enumerate(self.rows) if row.finish_reason is None]
            tokens = torch.full((len(self.rows),), self.filler, device=scores.device)
            if going:
                self.steps += 1
                version = self._version()
                chosen = [self.rows[index].choose(scores[index], version, self._texts) for index in going]
                tokens[going] = torch.tensor(chosen, device=scores.device)
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens[:, None], 0.0)

    def abort(self, request_ids: set[int]) -> list[HFRow]:
        """End these rows before their next token and return them; rows that have finished are left alone."""
        with self._lock:
            running = [row for row in self.rows if row.finish_reason is None]
            ended = [row for row in running if row.request.request_id in request_ids]
            for row in ended:
                row.finish_reason = "abort"
        return ended


class Ended(StoppingCriteria):
    """Reports to `generate` which rows of a batch have finished."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch

    def __call__(self, input_ids: Tensor, scores: object, **kwargs: object) -> Tensor:
        """Return whether each row has finished, [B] bool."""
        return torch.tensor(
            [row.finish_reason is not None for row in self.batch.rows], device=input_ids.device
        )


class HFEngine(SessionEngine):
    """A `RolloutEngine` in this process; `source` fills the model's weights at `wake_up` and frees them at
    `sleep`.

    `decode` turns token ids into text, for stop texts: without it a request that has some is refused. Memory
    for keys and values exists while a batch is generated, and never between batches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 64,
        decode: Decode | None = None,
        source: WeightSource | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.source = source
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._texts = StopTexts(decode) if decode else None
        self._version = 0
        self._asleep = source is not None
        self._batches: bool | None = None

    @property
    def asleep(self) -> bool:
        """Whether the weights are with their source."""
        return self._asleep

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled tokens carry."""
        return self._version

    def set_version(self, version: int) -> None:
        """Set the version of the weights, which the engine shares with the trainer."""
        self._version = version

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the model by their Hugging Face names; RolloutError as `load_weights`."""
        load_weights(self.model, weights)
        self._version = version

    def sleep(self, level: int = 1) -> None:
        """Free the weights where they have a source; RolloutError while generating."""
        self._check_free("sleep()")
        self._asleep = True
        if self.source is not None:
            self.source.release()
        give_back(self.model.device)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Fetch the weights from their source, if they have one, and allow generation."""
        if self._asleep and self.source is not None:
            self.source.acquire(self._version)
        self._asleep = False

    def _new_session(self, closed: bool) -> HFSession:
        return HFSession(
            problem=self._problem,
            next_batch=self._next_batch,
            run=self._run,
            version=lambda: self._version,
            closed=self._closed,
        )

    def _next_batch(self, waiting: Sequence[GenerationRequest]) -> Batch:
        """Return a batch of the first of these requests, as many as the model takes together."""
        if self._batches is None and len(waiting) > 1 and self.max_num_seqs > 1:
            self._batches = batches_well(self.model)
        size = 1
        if self._batches:
            size = self.max_num_seqs
        rows = [HFRow(request, self._ends(request)) for request in waiting[:size]]
        filler = getattr(self.model.generation_config, "pad_token_id", None)
        if not isinstance(filler, int):
            filler = 0
        return Batch(rows, version=lambda: self._version, texts=self._texts, filler=filler)

    def _problem(self, request: GenerationRequest) -> str | None:
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        positions = longest_generated(self.model.config)
        return request_problem(request, vocabulary=vocabulary, positions=positions) or sampling_problem(
            request.sampling,
            vocabulary=vocabulary,
            end_tokens=self._ends(request),
            can_decode=self._texts is not None,
        )

    def _run(self, batch: Batch) -> None:
        """Fill the rows of a batch; where the model fails, those that had not finished fail."""
        started = perf_counter()
        requests = [row.request for row in batch.rows]
        contexts = [token_ids_of(request.context) for request in requests]
        longest = max(request.sampling.max_tokens - len(request.partial_response) for request in requests)
        try:
            generate(
                self.model,
                contexts,
                batch.filler,
                GenerationConfig(max_new_tokens=longest, use_cache=True),
                logits_processor=LogitsProcessorList([batch]),
                stopping_criteria=StoppingCriteriaList([Ended(batch)]),
            )
        except Exception as error:
            logger.exception("the hf engine failed in a batch of %d requests", len(requests))
            for row in batch.rows:
                row.fail(f"the hf engine failed: {type(error).__name__}: {error}")
        self._count(batch, perf_counter() - started)

    def _ends(self, request: GenerationRequest) -> frozenset[int]:
        ends = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            ends += self.eos_token_ids
        return frozenset(ends)

    def _count(self, batch: Batch, seconds: float) -> None:
        self._stats.generated_tokens += sum(
            len(row.tokens) - len(row.request.partial_response) for row in batch.rows
        )
        self._stats.prefill_tokens += sum(len(row.request.context) for row in batch.rows)
        self._stats.decode_steps += max(0, batch.steps - 1)
        self._stats.max_rows = max(self._stats.max_rows, len(batch.rows))
        self._stats.seconds += seconds


def padded(prompts: Sequence[Sequence[int]], filler: int, device: torch.device) -> dict[str, Tensor]:
    """Return left-padded input_ids and attention_mask, each [B, longest prompt] int64."""
    rows = [torch.tensor(prompt, device=device) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return {
        "input_ids": pad(rows, padding_value=filler),
        "attention_mask": pad([torch.ones_like(row) for row in rows]),
    }


@torch.no_grad()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], filler: int, config: GenerationConfig, **more: Any
) -> Any:
    """Return what transformers' own greedy `generate` makes of left-padded prompts."""
    config.update(do_sample=False, pad_token_id=filler)
    with own_attention(model):
        return model.generate(**padded(prompts, filler, model.device), generation_config=config, **more)


def batches_well(model: PreTrainedModel) -> bool:
    """Return whether a left-padded prompt gets the log-probs that it gets alone, tried with a few tokens."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    long = [(7 * place + 5) % vocabulary for place in range(9)]
    config = GenerationConfig(max_new_tokens=3, return_dict_in_generate=True, output_logits=True)
    beside = generate(model, [long, long[:4]], 0, config).logits
    alone = generate(model, [long[:4]], 0, config).logits
    limit = probe_tolerance(model.dtype)
    return all(
        difference(a[-1].log_softmax(-1), b[-1].log_softmax(-1), model.dtype) <= limit
        for a, b in zip(beside, alone)
    )


@contextmanager
def own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Use transformers' eager attention, no dropout and a default generation_config inside the block."""
    attention = model.config._attn_implementation
    habits = model.generation_config
    training = [module for module in model.modules() if module.training]
    model.eval()
    model.generation_config = GenerationConfig()
    switches = attention != "eager" and getattr(model, "_supports_attention_backend", False)
    if switches:
        model.set_attn_implementation("eager")
    try:
        yield
    finally:
        if switches:
            model.set_attn_implementation(attention)
        model.generation_config = habits
        for module in training:
            module.training = True


@dataclass(eq=False, kw_only=True)
class HFSession:
    """An `EngineSession`; `abort` may come from another thread while a batch is decoded.

    `problem` returns the reason why a request cannot be served, `next_batch` a batch of the first waiting
    requests; `run` fills the rows of a batch. `version`: of the weights there are now.
    """

    problem: Callable[[GenerationRequest], str | None]
    next_batch: Callable[[Sequence[GenerationRequest]], Batch]
    run: Callable[[Batch], None]
    version: Callable[[], int]
    closed: Callable[[], None]

    def __post_init__(self) -> None:
        self._waiting: list[GenerationRequest] = []
        self._batch: Batch | None = None

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now."""
        return self.version()

    @property
    def num_running(self) -> int:
        """Number of requests in the batch that is decoded."""
        if self._batch is None:
            return 0
        return len(self._batch.rows)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return self._batch is None and not self._waiting

    def add(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Add requests to those that wait; those that cannot be served come back. RolloutError for an id in
        use.
        """
        decoded = [] if self._batch is None else [row.request for row in self._batch.rows]
        check_ids(requests, {request.request_id for request in [*self._waiting, *decoded]})
        good, outputs = sort_out(requests, self.problem)
        self._waiting += good
        return outputs

    def step(self) -> list[GenerationOutput]:
        """Decode one batch to its end; outputs of rows that were aborted meanwhile came from `abort`."""
        if not self._waiting:
            return []
        batch = self._batch = self.next_batch(self._waiting)
        self._waiting = self._waiting[len(batch.rows) :]
        try:
            self.run(batch)
        finally:
            self._batch = None
        return [row.output() for row in batch.rows if row.finish_reason != "abort"]

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End waiting requests at once, and those of the batch before their next token. A row that finished
        by itself comes out of `step`.
        """
        wanted = set(request_ids)
        outputs = [aborted(request) for request in self._waiting if request.request_id in wanted]
        self._waiting = [request for request in self._waiting if request.request_id not in wanted]
        if self._batch is not None:
            outputs += [row.output() for row in self._batch.abort(wanted)]
        return outputs

    def so_far(self, since: Mapping[int, int]) -> list[PartialOutput]:
        """Return nothing: between two steps there is no partial response."""
        return []

    def close(self) -> None:
        """Drop waiting requests, and release the engine for other uses."""
        self._waiting = []
        self.closed()
