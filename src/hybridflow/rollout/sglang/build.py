"""Builds an SGLang engine from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.push.sender import Transport
from hybridflow.rollout.remote.http import Address
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.sglang.engine import SGLangEngine
from hybridflow.rollout.sglang.server import Server
from hybridflow.rollout.sglang.settings import server_arguments, shape_of, start_server

logger = logging.getLogger(__name__)


def build_sglang_engine(
    config: RolloutConfig, model: ModelFacts, eos_token_ids: Sequence[int], *, rank: int
) -> SGLangEngine:
    """Return the engine of rollout rank `rank`, with a server of its own; RolloutError where it does not
    start.
    """
    server = config.server
    arguments = server_arguments(config, model)
    process = None
    if server.address is None:
        logger.info("an sglang server starts, which may take minutes")
        address, process = start_server(arguments, python=server.python, timeout=server.start_timeout)
    else:
        address = Address(server.address if isinstance(server.address, str) else server.address[rank])
    transport: Transport | None = None if server.transport == "auto" else server.transport
    shape = shape_of(config, model)
    runner = Server(
        address,
        process,
        vocabulary=shape.vocabulary,
        positions=shape.positions,
        max_streams=config.max_num_seqs,
        timeout=server.push_timeout,
        transport=transport,
        bucket_bytes=config.update_weights_bucket_megabytes * 2**20,
    )
    texts = not arguments.get("skip_tokenizer_init", False)
    return SGLangEngine(
        runner, eos_token_ids=eos_token_ids, frees_cache=config.free_cache_engine, texts=texts
    )
