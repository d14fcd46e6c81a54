"""The native engine. In one process it drives the module that trains: no second copy of the weights, nothing to send.

Where training spreads the weights over ranks, its module is a twin that a `WeightSource` fills at `wake_up` and empties at `sleep`. Where
ranks generate together (`Replica`), each runs this engine on the same requests, in lockstep.

requests ──check──► errors (that request only)
    └──► Generation (scheduler, rows, slots) ──step──► outputs, as they finish
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hybridflow.distributed.replica import Replica
from hybridflow.errors import RolloutError
from hybridflow.models.attention import PackedLayout
from hybridflow.models.kv_cache import LayerShape, SlotCache
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import GenerationOutput, GenerationRequest, RolloutStats, WeightSource
from hybridflow.rollout.native.generation import Generation
from hybridflow.rollout.native.memory import free_memory, rows_that_fit

logger = logging.getLogger(__name__)


class NativeEngine:
    """A `RolloutEngine` in this process. The KV cache exists from the first `generate` until `sleep`.

    With a `source` the weights exist from `wake_up` until `sleep`, so the engine begins asleep.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.5,
        source: WeightSource | None = None,
        replica: Replica | None = None,
    ) -> None:
        self.policy, self.source, self.replica = policy, source, replica or Replica()
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.gpu_memory_utilization = gpu_memory_utilization
        self._version = 0
        self._stats = RolloutStats()
        self._asleep = source is not None
        self._running: Generation | None = None
        self._cache: SlotCache | None = None
        self._shapes: dict[int, LayerShape] | None = None

    @property
    def policy_version(self) -> int:
        """Version that tokens sampled now carry."""
        return self._version

    @property
    def stats(self) -> RolloutStats:
        """Of the newest `generate`, up to now."""
        return self._stats

    @property
    def cache_bytes(self) -> int:
        """Memory that the KV cache holds now."""
        return 0 if self._cache is None else self._cache.nbytes

    def set_version(self, version: int) -> None:
        """Say that the shared weights now have this version; a running `generate` goes on under it, with the keys and values it has."""
        self._version = version

    @torch.no_grad()
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights into the module, by Hugging Face name; RolloutError for a name or shape the model does not have.

        Only for weights that come from elsewhere: what the trainer does to the shared module is here already.
        """
        own = self.policy.hf.state_dict()
        for name, weight in weights:
            if name not in own or own[name].shape != weight.shape:
                has = f"its own is {tuple(own[name].shape)}" if name in own else "it has no weight of that name"
                raise RolloutError(f"update_weights got {name!r} of shape {tuple(weight.shape)}, which does not fit the model: {has}")
            own[name].copy_(weight)
        self._version = version

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache, and the weights where they have a source; else they stay, at every level. RolloutError while generating."""
        if self._running is not None:
            raise RolloutError("sleep() was called while generate() is running: read its outputs to the end first")
        self._asleep, self._cache = True, None
        if self.source is not None:
            self.source.release()
        if self.policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Fetch the weights where they have a source, and allow generation; `generate` makes the cache, as large as needed."""
        if self._asleep and self.source is not None:
            self.source.acquire(self._version)
        self._asleep = False

    def abort(self, request_ids: Iterable[int]) -> list[GenerationOutput]:
        """End requests of the running `generate`; their partial responses come back here and not there."""
        return [] if self._running is None else self._running.abort(set(request_ids))

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        """One output per request, as they finish.

        A request that cannot be served (empty prompt, unknown token id, longer than the model's positions) gives reason "error" and
        the others go on. RolloutError when not even one row's cache fits into memory, for a repeated request id, when asleep, and
        for a second call while one is running. The module is in eval mode until the last output is read.
        """
        if self._asleep:
            raise RolloutError("generate() was called on a sleeping engine: call wake_up() first")
        if self._running is not None:
            raise RolloutError("generate() was called while another one is running: read its outputs to the end first")
        if len({request.request_id for request in requests}) != len(requests):
            raise RolloutError("two requests of one generate() call have the same request_id: they must be unique")
        self._stats = RolloutStats()
        return self._generate(requests)

    def _generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationOutput]:
        good = []
        for request in requests:
            problem = self._problem(request)
            if problem is None:
                good.append(request)
            else:
                yield GenerationOutput(request.request_id, [], [], "error", [], f"request {request.request_id}: {problem}")
        if not good:
            return
        if self._running is not None:  # both were asked for before either began
            raise RolloutError("generate() was called while another one is running: read its outputs to the end first")
        tokens = 0
        training = [module for module in self.policy.modules() if module.training]
        self.policy.eval()  # no dropout: log-probs must be those of the policy
        broken = False
        try:
            self._running = self._start(good)
            while not self._running.done:
                for output in self._running.step():
                    broken = broken or output.error is not None
                    tokens += hash((output.request_id, *output.token_ids))
                    yield output
            self.replica.check_same(tokens)
        finally:
            self._running = None
            if broken:  # what is not finite must not stay behind the masks of later rows
                self._cache = None
            for module in training:
                module.training = True

    def _problem(self, request: GenerationRequest) -> str | None:
        """Why a request cannot be served, if so."""
        prompt, sampling = request.prompt_token_ids, request.sampling
        vocabulary = self.policy.head.weight.shape[0]
        if not prompt:
            return "the prompt is empty; at least one token is needed to predict the next"
        for name, ids in (("prompt", prompt), ("stop_token_ids", sampling.stop_token_ids)):
            if ids and not (min(ids) >= 0 and max(ids) < vocabulary):
                return f"{name} holds token id {min(ids) if min(ids) < 0 else max(ids)}, and the model's vocabulary is 0..{vocabulary - 1}"
        positions = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and len(prompt) + sampling.max_tokens > positions:
            return (
                f"prompt of {len(prompt)} tokens + max_tokens {sampling.max_tokens} = {len(prompt) + sampling.max_tokens} is more than the "
                f"model's max_position_embeddings {positions}: shorten data.max_prompt_length or data.max_response_length"
            )
        return None

    def _start(self, requests: Sequence[GenerationRequest]) -> Generation:
        """Slots for the requests, as many at once as the settings and the memory allow."""
        capacity = max(len(request.prompt_token_ids) + request.sampling.max_tokens for request in requests)
        wanted = min(self.max_num_seqs, len(requests))
        spare = int(wanted < len(requests))  # for the prompt of a group that enters in parts
        if self._cache is None or not self._cache.fits(wanted + spare, capacity):
            self._cache = None
            if self._shapes is None:
                self._shapes = layer_shapes(self.policy)
            budget = self.replica.smallest(int(self.gpu_memory_utilization * free_memory(self.policy.device)))
            rows = rows_that_fit(wanted, shapes=self._shapes.values(), capacity=capacity, budget=budget, spare=spare)
            if rows < wanted:
                rows = rows_that_fit(wanted, shapes=self._shapes.values(), capacity=capacity, budget=budget, spare=1)
                logger.warning(
                    "memory holds the KV cache of %d rows of %d tokens, not %d: generating %d at a time", rows, capacity, wanted, rows
                )
                wanted, spare = rows, 1
            self._cache = SlotCache(self._shapes, wanted + spare, capacity, self.policy.device)
        return Generation(
            self.policy,
            self._cache,
            requests,
            eos_token_ids=self.eos_token_ids,
            max_rows=wanted,
            max_batched_tokens=self.max_num_batched_tokens,
            version=lambda: self._version,
            stats=self._stats,
        )


@torch.no_grad()
def layer_shapes(policy: PolicyModel) -> dict[int, LayerShape]:
    """What each layer stores per token, seen in a pass over one token."""
    shapes: dict[int, LayerShape] = {}

    def look(layer: int, key: Tensor, value: Tensor) -> None:
        shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)

    token = torch.zeros(1, 1, dtype=torch.int64, device=policy.device)
    policy.hidden(token, token, PackedLayout.build([1], policy.device, kv_sink=look))
    return shapes
