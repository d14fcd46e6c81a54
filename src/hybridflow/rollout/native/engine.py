"""The native engine. In one process it generates with the very module that trains, so no weights are sent.

Where training shards the weights over ranks, the engine has a second module, which a `WeightSource` fills at
`wake_up` and empties at `sleep`. Where ranks generate together (`ReplicaRanks`), each runs this engine on the
same requests, in lockstep.

open() ──► Session: requests join at any time, or all before its first step
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

from torch import Tensor

from hybridflow.distributed.accelerators import features, is_accelerator
from hybridflow.distributed.facilities import facilities
from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.errors import RolloutError
from hybridflow.models.attention.paged_kernel import BLOCK_SIZE, kernel_problem, varlen_kernel
from hybridflow.models.attention.rope import longest_generated
from hybridflow.models.attention.scores import Scores
from hybridflow.models.cache.kv_cache import KVCache, LayerShape, SlotCache, bytes_per_token, slot_capacity
from hybridflow.models.cache.paged_cache import PagedCache
from hybridflow.models.copies.quantized_copy import QuantizedCopy
from hybridflow.models.files.probe import layer_facts
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import GenerationRequest, WeightSource
from hybridflow.rollout.memory import free_memory, give_back
from hybridflow.rollout.native.drafts import DraftSettings
from hybridflow.rollout.native.graphs import GraphDecoder, GraphSampler, graph_decoder
from hybridflow.rollout.native.responses import Decode, StopTexts
from hybridflow.rollout.native.rows import end_tokens, row_numbers
from hybridflow.rollout.native.sampling import sampling_problem
from hybridflow.rollout.native.session import Session, SessionSettings, Weights
from hybridflow.rollout.native.step import ROUTES, routes_shape
from hybridflow.rollout.session_engine import SessionEngine, load_weights, request_problem

logger = logging.getLogger(__name__)

CacheKind = Literal["auto", "slots", "paged"]


class NativeEngine(SessionEngine):
    """A `RolloutEngine` in this process. The KV cache exists from the first use until `sleep`, and grows with
    the rows and their length.

    With a `source` the weights exist from `wake_up` until `sleep`, so the engine begins asleep.
    `enable_prefix_caching`: prompts that begin with the same tokens as another share its keys and values,
    until the weights change. `recompute_on_update`: when weights change while rows run, the keys and values
    of these rows are computed again; else they stay. `decode`: token ids to text, for requests with stop
    texts; left out, such a request gives an error. `enforce_eager`: no CUDA graphs;
    `cudagraph_capture_sizes`: numbers of rows to make them for; left out: few, up to `max_num_seqs`.
    `kv_cache`: rows in slots or in blocks; auto: blocks on CUDA, where a kernel reads them. `block_size`:
    tokens of a block. `look_ahead`: begin a step before the host has seen the tokens of the one before;
    `reserve_cache`: take the memory of all blocks at once; both are left out for: not on a CPU.
    `records_routes`: outputs have the experts that their tokens went to, kept beside keys and values; no
    graphs then. `quantized`: generate with this copy of the policy, which is refreshed when the weights have
    changed. `drafts`: tokens are drafted from what rows and their prompts have, and verified; no look-ahead
    then.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        eos_token_ids: Sequence[int],
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        gpu_memory_utilization: float = 0.5,
        enable_prefix_caching: bool = True,
        recompute_on_update: bool = False,
        source: WeightSource | None = None,
        replica: ReplicaRanks | None = None,
        decode: Decode | None = None,
        enforce_eager: bool | None = None,
        cudagraph_capture_sizes: Sequence[int] | None = None,
        kv_cache: CacheKind = "auto",
        block_size: int = BLOCK_SIZE,
        look_ahead: bool | None = None,
        reserve_cache: bool | None = None,
        records_routes: bool = False,
        quantized: QuantizedCopy | None = None,
        drafts: DraftSettings | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.quantized = quantized
        self.model = policy if quantized is None else quantized.policy
        """The module that generates."""
        self.records_routes = records_routes
        if records_routes:
            self.model.follow_routes()
        self.source = source
        self.replica = replica or ReplicaRanks()
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.gpu_memory_utilization = gpu_memory_utilization
        self.enable_prefix_caching = enable_prefix_caching
        self.recompute_on_update = recompute_on_update
        self._stop_texts = None if decode is None else StopTexts(decode)
        self._version = 0
        self._weights_state = 0  # counts changes
        self._copy_state: int | None = None  # the count when the copy was refreshed last
        self._asleep = source is not None
        self._cache: KVCache | None = None
        self._shapes: dict[int, LayerShape] | None = None
        self.kv_cache = kv_cache
        self.block_size = block_size
        beside_host = is_accelerator(self.model.device.type)
        self.drafts = drafts
        self.look_ahead = drafts is None and (beside_host if look_ahead is None else look_ahead)
        self.reserve_cache = beside_host if reserve_cache is None else reserve_cache
        self._paged = False
        self.enforce_eager = enforce_eager
        self.cudagraph_capture_sizes = cudagraph_capture_sizes
        self.graphs: GraphDecoder | None = None
        """Decoder by CUDA graphs; None before the first use, and where no graphs are used."""
        self.sampler: GraphSampler | None = None
        """Sampler by CUDA graphs, beside `graphs`."""

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now."""
        return self._version

    @property
    def asleep(self) -> bool:
        """Whether `wake_up` has to be called before generation."""
        return self._asleep

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache holds now."""
        if self._cache is None:
            return 0
        return self._cache.nbytes

    def set_version(self, version: int) -> None:
        """Set the version of the shared weights, which have changed in place.

        Running rows go on under it, with their keys and values or, with `recompute_on_update`, new ones.
        """
        self._weights_state += int(version != self._version)
        self._weights_are(version)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights that come from elsewhere into the module, by Hugging Face name.

        RolloutError as in `load_weights`. What the trainer does to a shared module is here already.
        """
        self._weights_state += 1
        load_weights(self.policy.hf, weights)
        self._weights_are(version)

    def _weights_are(self, version: int) -> None:
        self._version = version
        if not self._asleep:
            self._refresh_copy()
        self._recheck_graphs()

    def _refresh_copy(self) -> None:
        """Refresh the copy where weights have changed; those fetched from a source are freed again."""
        if self.quantized is None or self._copy_state == self._weights_state:
            return
        if self.source is not None:
            self.source.acquire(self._version)
        try:
            self.quantized.refresh()
        finally:
            if self.source is not None:
                self.source.release()
        self._copy_state = self._weights_state

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and, at every level, weights that have a source. RolloutError while in use.

        The memory of blocks may come back at its addresses when all of it is taken at once. Graphs are kept
        for that, with the little memory that they own, unless the weights go too.
        """
        self._check_free("sleep()")
        self._asleep = True
        self._cache = None
        weights_stay = self.source is None and self.quantized is None
        if self.graphs is not None and not (self._paged and self.reserve_cache and weights_stay):
            self.graphs.drop()
        if self.sampler is not None:
            self.sampler.drop()
        if self.source is not None:
            self.source.release()
        if self.quantized is not None:
            self.quantized.free()
            self._copy_state = None
        give_back(self.model.device)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Fetch weights that have a source, and allow generation; the cache is made as it is needed."""
        if self._asleep:
            give_back(self.model.device)  # what training left
        if self._asleep and self.source is not None and self.quantized is None:
            self.source.acquire(self._version)
        self._refresh_copy()
        self._asleep = False

    @cached_property  # a configuration is slow to ask, and each request asks
    def _positions(self) -> int | None:
        """Most tokens that the model has positions for, where it says so."""
        return longest_generated(self.model.config)

    def _problem(self, request: GenerationRequest) -> str | None:
        """Return why a request cannot be served, or None; whatever its own values raise is such a reason."""
        sampling = request.sampling
        vocabulary = self.model.head.weight.shape[0]
        try:
            ends = end_tokens(sampling, self.eos_token_ids, vocabulary)
            problem = request_problem(
                request,
                vocabulary=vocabulary,
                positions=self._positions,
                reads_media=self.model.vision is not None,
            )
            problem = problem or sampling_problem(
                sampling, vocabulary=vocabulary, end_tokens=ends, can_decode=self._stop_texts is not None
            )
            if problem is None:
                row_numbers(request, self.eos_token_ids, vocabulary)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return f"one of its values cannot be used: {type(error).__name__}: {error}"
        return problem

    def _kv_cache(self) -> KVCache:
        """Return the KV cache; the first call makes it, empty, and sets how large it may become."""
        if self._cache is None:
            if self._shapes is None:
                self._shapes, scores = layer_facts(self.model)
                self._paged = self._chosen(self._shapes, scores)
                self.graphs = graph_decoder(
                    self.model,
                    max_rows=self.max_num_seqs,
                    enforce_eager=True if self.records_routes else self.enforce_eager,
                    sizes=self.cudagraph_capture_sizes,
                    ranks=self.replica.size,
                )
                if self.graphs is not None:
                    recorder = facilities(self.model.device.type).recorder(self.model.device)
                    self.sampler = GraphSampler(recorder, self.graphs.sizes)
                if self.records_routes:
                    self._shapes = {**self._shapes, ROUTES: routes_shape(self.model.follow_routes())}
            budget = self.replica.smallest(int(self.gpu_memory_utilization * free_memory(self.model.device)))
            self._cache = self._new_cache(self._shapes, budget // bytes_per_token(self._shapes))
        if isinstance(self._cache, SlotCache):
            exact = self.model.exact
            self._cache.capacity_of = slot_capacity if exact is None else exact.num_keys
        return self._cache

    def _new_cache(self, shapes: dict[int, LayerShape], max_tokens: int) -> KVCache:
        device = self.model.device
        if not self._paged:
            return SlotCache(shapes, device=device, max_tokens=max_tokens)
        kernel = None
        if features(device.type).varlen_attention:
            kernel = varlen_kernel()
        max_blocks = max(1, max_tokens // self.block_size)
        reserve = None
        if self.reserve_cache:
            reserve = self._positions or max_tokens
        return PagedCache(shapes, self.max_num_seqs, max_blocks, self.block_size, device, kernel, reserve)

    def _chosen(self, shapes: dict[int, LayerShape], scores: dict[int, Scores]) -> bool:
        """Return whether the KV cache is paged, the same on all ranks. RolloutError where it is set so and
        the device has no kernel that reads blocks.
        """
        device = self.model.device
        may_read_blocks = features(device.type).varlen_attention
        slots = not may_read_blocks or self.model.exact is not None
        if self.kv_cache == "slots" or (self.kv_cache == "auto" and slots):
            return False
        if not may_read_blocks:  # no kernel: rows are gathered, which is right and slow
            return True
        problem = kernel_problem(shapes, scores, device, self.block_size)
        if self.replica.smallest(int(problem is None)) == 1:
            return True
        problem = problem or "another rank has no kernel for them"
        if self.kv_cache == "paged":
            raise RolloutError(f"actor_rollout_ref.rollout.kv_cache=paged: {problem}; set it to slots")
        logger.info("the KV cache is in slots: %s", problem)
        return False

    def _new_session(self, closed: bool) -> Session:
        """Return a session; ranks of a replica open one, and do what they do with it, together.

        A `closed` one prefills all requests that fit before the first token is decoded, and raises
        RolloutError where the KV cache of one request does not fit into memory. Another decodes after each
        prefill pass, keeps finished rows as prefixes of later prompts, and refuses such a request alone.
        """
        settings = SessionSettings(
            eos_token_ids=self.eos_token_ids,
            max_rows=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens,
            closed=closed,
            share_prefixes=self.enable_prefix_caching,
            recompute=self.recompute_on_update,
            stop_texts=self._stop_texts,
            look_ahead=self.look_ahead,
            drafts=self.drafts,
        )
        self._refresh_copy()
        cache = self._kv_cache()
        self._recheck_graphs()

        def problem(request: GenerationRequest) -> str | None:
            found = self._problem(request)
            if found is not None:
                return found
            found = cache.problem(request.most_tokens)
            if found is not None and closed:  # training without its longest rows would be another training
                raise RolloutError(found)
            return found

        return Session(
            self.model,
            cache,
            settings,
            weights=lambda: Weights(self._version, self._weights_state),
            stats=self._stats,
            graphs=self.graphs,
            sampler=self.sampler,
            replica=self.replica,
            problem=problem,
            closed=self._ended,
        )

    def _recheck_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.recheck()

    def _ended(self, broken: bool) -> None:
        self._closed()
        if broken:  # what is not finite must not stay behind the masks of later rows
            self._cache = None
