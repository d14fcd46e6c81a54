"""The hf engine: transformers' `generate` behind the protocol of all engines. It is slow and simple, and the
other engines are tested against it.

    requests ──check──► errors (that request only)
        └──► batches of `max_num_seqs`, left-padded ──generate──► outputs, when a batch is done

It drives the module it is given with transformers' own attention, which it switches on for the call and off
again. So it can share the module that trains, and it runs models that our attention refuses. A model that
says other things of a padded row in a batch (recurrent ones that take no mask) gets one row at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hybridflow.errors import RolloutError
from hybridflow.models.probe import difference, probe_tolerance
from hybridflow.protocol.prompt import token_ids_of
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats, WeightSource
from hybridflow.rollout.hf.batch import Batch, Ended, Row
from hybridflow.rollout.load_weights import load_weights
from hybridflow.rollout.native.sampling import sampling_problem
from hybridflow.rollout.native.stop_text import Decode, StopTexts
from hybridflow.rollout.requests import aborted, check_ids, refused, request_problem
from hybridflow.rollout.unused_memory import give_back

logger = logging.getLogger(__name__)


class HFEngine:
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
        self.model = model
        self.source = source
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self._texts = StopTexts(decode) if decode else None
        self._version = 0
        self._stats = RolloutStats()
        self._asleep = source is not None
        self._running = False
        self._batch: Batch | None = None
        self._batches: bool | None = None
        self._waiting: list[GenerationRequest] = []

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled tokens carry."""
        return self._version

    @property
    def stats(self) -> RolloutStats:
        """Statistics of the newest `generate`, up to now."""
        return self._stats

    def set_version(self, version: int) -> None:
        """Set the version of the weights, which the engine shares with the trainer."""
        self._version = version

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the model by their Hugging Face names.

        Raises RolloutError for a name or shape that the model does not have, and for weights that are
        missing, unless the sender says by `SomeWeights` that the others are in place.
        """
        load_weights(self.model, weights)
        self._version = version

    def sleep(self, level: int = 1) -> None:
        """Free the weights where they have a source; keys and values are freed with each batch. RolloutError
        while generating.
        """
        if self._running:
            raise RolloutError(
                "sleep() was called while generate() is running: read its outputs to the end first"
            )
        self._asleep = True
        if self.source is not None:
            self.source.release()
        give_back(self.model.device)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Fetch the weights from their source, if they have one, and allow generation."""
        if self._asleep and self.source is not None:
            self.source.acquire(self._version)
        self._asleep = False

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests of the running `generate`: waiting ones at once, those of the batch that is decoded
        (another thread's) before their next token. A row that finished by itself comes out of `generate`.
        """
        wanted = set(request_ids)
        waiting = [request for request in self._waiting if request.request_id in wanted]
        self._waiting = [request for request in self._waiting if request.request_id not in wanted]
        outputs = [aborted(request) for request in waiting]
        if self._batch is not None:
            outputs += [row.output() for row in self._batch.abort(wanted)]
        return outputs

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Yield one output for each request, batch by batch.

        A request that cannot be served gives reason "error" and the others go on; where the model fails, all
        of its batch that had not finished do. RolloutError for a repeated request id, when asleep, and for a
        second call while one is running.
        """
        if self._asleep:
            raise RolloutError("generate() was called on a sleeping engine: call wake_up() first")
        if self._running:
            raise RolloutError(
                "generate() was called while another one is running: read its outputs to the end first"
            )
        check_ids(requests)
        self._stats = RolloutStats()
        return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        problems = {request.request_id: self._problem(request) for request in requests}
        for request in requests:
            if (problem := problems[request.request_id]) is not None:
                yield refused(request, problem)
        if self._running:  # both were asked for before either began
            raise RolloutError(
                "generate() was called while another one is running: read its outputs to the end first"
            )
        self._running = True
        self._waiting = [request for request in requests if problems[request.request_id] is None]
        try:
            while self._waiting:
                yield from self._run(self._next())
        finally:
            self._running = False
            self._waiting = []

    def _next(self) -> list[GenerationRequest]:
        """Remove the next batch from the waiting requests and return it."""
        if self._batches is None and len(self._waiting) > 1 and self.max_num_seqs > 1:
            self._batches = batches_well(self.model)
        number = 1
        if self._batches:
            number = self.max_num_seqs
        taken = self._waiting[:number]
        self._waiting = self._waiting[number:]
        return taken

    def _problem(self, request: GenerationRequest) -> str | None:
        vocabulary = self.model.get_output_embeddings().weight.shape[0]
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return request_problem(request, vocabulary=vocabulary, positions=positions) or sampling_problem(
            request.sampling,
            vocabulary=vocabulary,
            end_tokens=self._ends(request),
            can_decode=self._texts is not None,
        )

    def _run(self, requests: list[GenerationRequest]) -> Iterator[GenerationOutput]:
        """Generate one batch; outputs of aborted rows were returned by `abort` already."""
        started = perf_counter()
        rows = [Row(request, self._ends(request)) for request in requests]
        config = self.model.generation_config
        filler = config.pad_token_id if isinstance(getattr(config, "pad_token_id", None), int) else 0
        batch = self._batch = Batch(rows, version=lambda: self._version, texts=self._texts, filler=filler)
        try:
            with torch.no_grad(), own_attention(self.model):
                model: Any = self.model
                model.generate(
                    **padded(
                        [token_ids_of(request.context) for request in requests], filler, self.model.device
                    ),
                    generation_config=GenerationConfig(
                        do_sample=False,
                        max_new_tokens=max(
                            request.sampling.max_tokens - len(request.begun) for request in requests
                        ),
                        pad_token_id=filler,
                        use_cache=True,
                    ),
                    logits_processor=LogitsProcessorList([batch]),
                    stopping_criteria=StoppingCriteriaList([Ended(batch)]),
                )
        except Exception as error:
            logger.exception("the hf engine failed in a batch of %d requests", len(rows))
            for row in rows:
                row.fail(f"the hf engine failed: {type(error).__name__}: {error}")
        finally:
            self._batch = None
        self._count(batch, perf_counter() - started)
        yield from [row.output() for row in rows if row.finish_reason != "abort"]

    def _ends(self, request: GenerationRequest) -> frozenset[int]:
        ends = request.sampling.stop_token_ids
        if not request.sampling.ignore_eos:
            ends += self.eos_token_ids
        return frozenset(ends)

    def _count(self, batch: Batch, seconds: float) -> None:
        self._stats.generated_tokens += sum(len(row.tokens) - len(row.request.begun) for row in batch.rows)
        self._stats.prefill_tokens += sum(len(row.request.context) for row in batch.rows)
        self._stats.decode_steps += max(0, batch.steps - 1)
        self._stats.max_rows = max(self._stats.max_rows, len(batch.rows))
        self._stats.seconds += seconds


def padded(prompts: Sequence[Sequence[int]], filler: int, device: torch.device) -> dict[str, Tensor]:
    """Return left-padded input_ids and attention_mask, each [B, longest prompt] int64."""
    longest = max(len(prompt) for prompt in prompts)
    return {
        "input_ids": torch.tensor(
            [[filler] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device
        ),
        "attention_mask": torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device
        ),
    }


@torch.no_grad()
def batches_well(model: PreTrainedModel) -> bool:
    """Return whether a left-padded prompt gets the log-probs that it gets alone, tried with a few tokens."""
    vocabulary = model.get_output_embeddings().weight.shape[0]
    long = [(7 * place + 5) % vocabulary for place in range(9)]
    either: Any = model
    with own_attention(model):
        beside, alone = (
            either.generate(
                **padded(prompts, 0, model.device),
                generation_config=GenerationConfig(
                    do_sample=False,
                    max_new_tokens=3,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_logits=True,
                ),
            ).logits
            for prompts in ([long, long[:4]], [long[:4]])
        )
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
