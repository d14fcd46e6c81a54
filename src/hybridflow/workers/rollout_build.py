"""Building the rollout worker of a rank from the configuration, with its engine and the source of its
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.data.remote import hub_folder
from hybridflow.data.tokenizer import load_tokenizer, text_of
from hybridflow.distributed.process_group import ReplicaRanks
from hybridflow.engines import TrainEngine
from hybridflow.models.adapters.lora import LoraSettings, add_lora
from hybridflow.models.copies.twin import Twin
from hybridflow.models.files.build import build_policy, override_in_full, resolve_dtype
from hybridflow.rollout.base import RolloutEngine, WeightSource
from hybridflow.rollout.build import build_rollout_engine
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.rollout.remote.model import ModelFacts, ReplicaPlace
from hybridflow.rollout.sglang.engine import build_sglang_engine
from hybridflow.rollout.vllm.build import build_vllm_engine
from hybridflow.weight_sync.holding import Holding
from hybridflow.weight_sync.push import LocalPush, RemotePush, StagedPush
from hybridflow.weight_sync.reshard import GatheredTwin, OffloadedSource
from hybridflow.workers.rollout import RolloutWorker


def build_rollout_worker(
    config: RolloutConfig,
    *,
    actor_engine: TrainEngine | None,
    model: dict[str, Any],
    eos_token_ids: Sequence[int],
    lora: LoraSettings | None = None,
    tokenizer: str | None = None,
    frozen: bool = False,
) -> RolloutWorker:
    """Return the rollout worker of this rank; all ranks of its process group build it together.

    `actor_engine` is the actor's, where it lives in this process. `model` holds the arguments of
    `build_policy` for a rank without the actor; its dtype must be the one in which the actor computes.
    `tokenizer` is the folder of the tokenizer, for engines that read one. `frozen`: it is another model than
    the actor, whose weights stay as they are, and whose requests may name texts that end them. Raises
    ConfigError where `tensor_model_parallel_size` does not divide the ranks, ModelError where it does not
    suit the model.
    """
    if config.name in ("vllm", "sglang"):
        return _with_own_weights(config, actor_engine, model, eos_token_ids, lora, tokenizer)
    replica = ReplicaRanks.of_this_rank(config.tensor_model_parallel_size)
    build = partial(
        build_rollout_engine,
        config,
        eos_token_ids=eos_token_ids,
        replica=replica,
        decode=_decode(tokenizer, model) if config.stop or frozen else None,
        lora=lora,
    )
    if actor_engine is None:
        return _standalone(config, build, model, lora, replica, probe=frozen)
    policy = actor_engine.policy
    if replica.size == 1 and not policy.is_sharded:
        shared = None
        if actor_engine.is_offloaded:
            shared = OffloadedSource(actor_engine, None)
        return RolloutWorker(build(policy, source=shared, device=actor_engine.device))
    dtypes = {held.name: held.compute_dtype for held in actor_engine.held_weights()}
    twin = Twin(policy, dtypes=dtypes, device=actor_engine.device, lora=lora, replica=replica)
    source: WeightSource = GatheredTwin(actor_engine.held_weights, twin)
    if actor_engine.is_offloaded:
        source = OffloadedSource(actor_engine, source)
    return RolloutWorker(build(twin.policy, source=source), ranks=replica)


def _decode(tokenizer: str | None, model: dict[str, Any]) -> Callable[[Sequence[int]], str]:
    """Return the function from token ids to text, special tokens included, for responses that end with texts;
    only for these is the tokenizer loaded here.
    """
    assert tokenizer is not None, "a run has a tokenizer"
    return partial(text_of, load_tokenizer(tokenizer, bool(model.get("trust_remote_code"))))


def _standalone(
    config: RolloutConfig,
    build: Callable[..., RolloutEngine],
    model: dict[str, Any],
    lora: LoraSettings | None,
    replica: ReplicaRanks,
    *,
    probe: bool,
) -> RolloutWorker:
    device = torch.device(model["device"])
    dtype = resolve_dtype(model["dtype"], device)
    whole = device
    if replica.size > 1 or config.quantization is not None:  # the device has slices or quantized weights only
        whole = torch.device("cpu")
    where = {"device": whole, "dtype": str(dtype).removeprefix("torch.")}
    # of the actor's model, the actor's ranks do
    policy = build_policy(**{**model, **where}, probe=probe).requires_grad_(False)
    if lora is not None:
        add_lora(policy, lora)
    holding = Holding.whole(policy)
    if replica.size > 1:
        weights = dict(policy.named_parameters())
        twin = Twin(
            policy,
            dtypes={name: tensor.dtype for name, tensor in weights.items()},
            device=device if config.quantization is None else whole,
            lora=lora,
            replica=replica,
        )
        holding = Holding.of(twin, {name: tuple(tensor.shape) for name, tensor in weights.items()})
        for name, own in twin.allocate().items():
            own.copy_(holding.part(name, weights[name].detach()))
        policy = twin.policy
    recomputes = config.recompute_kv_after_update
    engine = build(policy, device=device)
    return RolloutWorker(engine, RemotePush(policy, holding), ranks=replica, recomputes=recomputes)


def _with_own_weights(
    config: RolloutConfig,
    actor_engine: TrainEngine | None,
    model: dict[str, Any],
    eos_token_ids: Sequence[int],
    lora: LoraSettings | None,
    tokenizer: str | None,
) -> RolloutWorker:
    """Return the worker of an engine that holds its own weights, which are pushed to it.

    They come from the actor's module, or from a copy of it on the CPU that the actor's ranks keep up to date.
    """
    device = torch.device(model["device"])
    facts = ModelFacts(
        path=hub_folder(str(model["path"])),
        device=device,
        dtype=str(resolve_dtype(model["dtype"], device)).removeprefix("torch."),
        trust_remote_code=bool(model.get("trust_remote_code")),
        override_config=override_in_full(
            model["path"], bool(model.get("trust_remote_code")), model.get("override_config")
        ),
        tokenizer=tokenizer,
        lora_rank=0 if lora is None else lora.largest_rank,
    )
    place = ReplicaPlace.of_this_rank(config.tensor_model_parallel_size, device)
    build = build_sglang_engine if config.name == "sglang" else build_vllm_engine
    engine: RolloutEngine = build(config, facts, eos_token_ids, place)
    if actor_engine is not None:
        owned = LocalPush(actor_engine.policy, actor_engine, adapters=config.lora_as_adapters)
        return RolloutWorker(engine, owned=owned)
    if not place.leads:
        return RolloutWorker(engine)
    policy = build_policy(**{**model, "device": "cpu", "dtype": facts.dtype}, probe=False).requires_grad_(
        False
    )
    if lora is not None:
        add_lora(policy, lora)
    stage = NativeEngine(policy, eos_token_ids=())  # never generates
    pushed = RemotePush(policy, Holding.whole(policy))
    return RolloutWorker(engine, pushed=StagedPush(pushed, stage, adapters=config.lora_as_adapters))
