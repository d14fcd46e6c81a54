"""Builds an SGLang engine from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.sglang.engine import SGLangEngine
from hybridflow.rollout.sglang.server import Server
from hybridflow.rollout.sglang.settings import positions_of, server_arguments, start_server


def build_sglang_engine(
    config: RolloutConfig, model: ModelFacts, eos_token_ids: Sequence[int], *, rank: int
) -> SGLangEngine:
    """Return the engine of rollout rank `rank`, over its own server; RolloutError where it does not start."""
    server = config.server
    arguments = server_arguments(config, model)
    start = partial(start_server, arguments, python=server.python, timeout=server.start_timeout)
    vocabulary = int(model.shape().vocab_size)
    runner = Server.of(config, rank, start, vocabulary=vocabulary, positions=positions_of(config, model))
    texts = not arguments.get("skip_tokenizer_init", False)
    return SGLangEngine(
        runner, eos_token_ids=eos_token_ids, frees_cache=config.free_cache_engine, texts=texts
    )
