"""The native engine. In one process it generates with the very module that trains, so no weights are sent.

Where training shards the weights over ranks, the engine has a second module, which a `WeightSource` fills at
`wake_up` and empties at `sleep`. Where ranks generate together (`ReplicaRanks`), each runs this engine on the
same requests, in lockstep.

open() ──► Session: requests join at any time, or all before its first step
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from hybridflow.distributed.accelerators import features
from hybridflow.distributed.replica_ranks import ReplicaRanks
from hybridflow.errors import RolloutError
from hybridflow.models.attention import PackedLayout, Scores
from hybridflow.models.flat_decoder import ScoresSeen
from hybridflow.models.kv_cache import LayerShape
from hybridflow.models.paged_layout import BLOCK_SIZE, kernel_problem, varlen_kernel
from hybridflow.models.policy import PolicyModel, run_backbone
from hybridflow.rollout.base import GenerationRequest, WeightSource
from hybridflow.rollout.load_weights import load_weights
from hybridflow.rollout.native.generation import BatchSettings, Generation, Weights
from hybridflow.rollout.native.graphs import GraphDecoder, graph_decoder
from hybridflow.rollout.native.memory import KVMemory, SlotMemory, free_memory
from hybridflow.rollout.native.paged_memory import PagedMemory
from hybridflow.rollout.native.row_numbers import end_tokens, row_numbers
from hybridflow.rollout.native.sampling import sampling_problem
from hybridflow.rollout.native.session import Session
from hybridflow.rollout.native.stop_text import Decode, StopTexts
from hybridflow.rollout.requests import request_problem
from hybridflow.rollout.session_engine import SessionEngine
from hybridflow.rollout.unused_memory import give_back

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
    tokens of a block.
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
    ) -> None:
        super().__init__()
        self.policy = policy
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
        self._asleep = source is not None
        self._memory: KVMemory | None = None
        self._shapes: dict[int, LayerShape] | None = None
        self.kv_cache = kv_cache
        self.block_size = block_size
        self._paged = False
        self.enforce_eager = enforce_eager
        self.cudagraph_capture_sizes = cudagraph_capture_sizes
        self.graphs: GraphDecoder | None = None
        """Decoder by CUDA graphs; None before the first use, and where no graphs are used."""

    @property
    def policy_version(self) -> int:
        """Version that tokens carry which are sampled now."""
        return self._version

    @property
    def asleep(self) -> bool:
        """Whether `wake_up` must come before anything is generated."""
        return self._asleep

    @property
    def cache_bytes(self) -> int:
        """Bytes that the KV cache holds now."""
        if self._memory is None:
            return 0
        return self._memory.cache.nbytes

    def set_version(self, version: int) -> None:
        """Set the version of the shared weights, which have changed in place.

        Running rows go on under it, with their keys and values or, with `recompute_on_update`, new ones.
        """
        self._weights_state += int(version != self._version)
        self._version = version
        self._recheck_graphs()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy weights that come from elsewhere into the module, by Hugging Face name.

        RolloutError as in `load_weights`. What the trainer does to a shared module is here already.
        """
        self._weights_state += 1
        load_weights(self.policy.hf, weights)
        self._version = version
        self._recheck_graphs()

    def sleep(self, level: int = 1) -> None:
        """Free the KV cache and, at every level, weights that have a source. RolloutError while in use."""
        self._check_free("sleep()")
        self._asleep = True
        self._memory = None
        if self.graphs is not None:
            self.graphs.drop()
        if self.source is not None:
            self.source.release()
        give_back(self.policy.device)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Fetch weights that have a source, and allow generation; the cache is made as it is needed."""
        if self._asleep:
            give_back(self.policy.device)  # what training left
        if self._asleep and self.source is not None:
            self.source.acquire(self._version)
        self._asleep = False

    def _problem(self, request: GenerationRequest) -> str | None:
        """Return why a request cannot be served, or None; whatever its own values raise is such a reason."""
        sampling = request.sampling
        vocabulary = self.policy.head.weight.shape[0]
        positions = getattr(self.policy.config.get_text_config(), "max_position_embeddings", None)
        try:
            ends = end_tokens(sampling, self.eos_token_ids)
            problem = request_problem(request, vocabulary=vocabulary, positions=positions)
            problem = problem or sampling_problem(
                sampling, vocabulary=vocabulary, end_tokens=ends, can_decode=self._stop_texts is not None
            )
            if problem is None:
                row_numbers(request, ends, vocabulary)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            return f"one of its values cannot be used: {type(error).__name__}: {error}"
        return problem

    def _slots(self) -> KVMemory:
        """Return the KV cache; the first call makes it, empty, and sets how large it may become."""
        if self._memory is None:
            if self._shapes is None:
                self._shapes, scores = layer_facts(self.policy)
                self._paged = self._chosen(self._shapes, scores)
                self.graphs = graph_decoder(
                    self.policy,
                    max_rows=self.max_num_seqs,
                    enforce_eager=self.enforce_eager,
                    sizes=self.cudagraph_capture_sizes,
                    ranks=self.replica.size,
                )
            budget = self.replica.smallest(int(self.gpu_memory_utilization * free_memory(self.policy.device)))
            self._memory = self._new_memory(self._shapes, budget)
        self._memory.exact = self.policy.exact
        return self._memory

    def _new_memory(self, shapes: dict[int, LayerShape], budget: int) -> KVMemory:
        device = self.policy.device
        if not self._paged:
            return SlotMemory(shapes, budget, device)
        kernel = None
        if features(device.type).varlen_attention:
            kernel = varlen_kernel()
        return PagedMemory(
            shapes, budget, device, max_rows=self.max_num_seqs, block_size=self.block_size, kernel=kernel
        )

    def _chosen(self, shapes: dict[int, LayerShape], scores: dict[int, Scores]) -> bool:
        """Return whether the KV cache is paged, the same on all ranks. RolloutError where it is set so and
        the device has no kernel that reads blocks.
        """
        device = self.policy.device
        may_read_blocks = features(device.type).varlen_attention
        slots = not may_read_blocks or self.policy.exact is not None
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
        settings = BatchSettings(
            eos_token_ids=self.eos_token_ids,
            max_rows=self.max_num_seqs,
            max_batched_tokens=self.max_num_batched_tokens,
            fill_first=closed,
            reuse_prefixes=self.enable_prefix_caching,
            keep_finished=not closed and self.enable_prefix_caching,
            recompute=self.recompute_on_update,
            stop_texts=self._stop_texts,
        )
        memory = self._slots()
        generation = Generation(
            self.policy,
            memory,
            settings,
            weights=lambda: Weights(self._version, self._weights_state),
            stats=self._stats,
            graphs=self.graphs,
        )
        self._recheck_graphs()

        def problem(request: GenerationRequest) -> str | None:
            found = self._problem(request)
            if found is not None:
                return found
            found = memory.problem(request.most_tokens)
            if found is not None and closed:  # training without its longest rows would be another training
                raise RolloutError(found)
            return found

        return Session(generation, problem=problem, replica=self.replica, closed=self._ended)

    def _recheck_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.recheck()

    def _ended(self, broken: bool) -> None:
        self._closed()
        if broken:  # what is not finite must not stay behind the masks of later rows
            self._memory = None


@torch.no_grad()
def layer_facts(policy: PolicyModel) -> tuple[dict[int, LayerShape], dict[int, Scores]]:
    """Return what each layer stores per token, and how it scores keys, as seen in a pass over one token."""
    shapes: dict[int, LayerShape] = {}

    def look(layer: int, key: Tensor, value: Tensor) -> None:
        shapes[layer] = LayerShape(key.shape[1], key.shape[-1], value.shape[-1], key.dtype)

    token = torch.zeros(1, 1, dtype=torch.int64, device=policy.device)
    seen = ScoresSeen(PackedLayout.build([1], policy.device, kv_sink=look))
    run_backbone(policy.hf.base_model, token, token, seen)
    return shapes, seen.of_layer
