"""SGLang as a `RolloutEngine`, built from the configuration, with sampling parameters in SGLang's terms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.remote.engine import PushedEngine
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.sglang.server import Server
from hybridflow.rollout.sglang.settings import positions_of, server_arguments, start_server

LOWEST_TEMPERATURE = 1e-6
"""SGLang treats lower temperatures as greedy."""
LARGEST_PENALTY = 2.0
_SEEDS = 1 << 63


def sglang_problem(sampling: SamplingParams, *, vocabulary: int, texts: bool) -> str | None:
    """Return why SGLang cannot serve these parameters, or None. `texts`: it has a tokenizer."""
    if not sampling.takes_argmax and sampling.temperature < LOWEST_TEMPERATURE:
        return (
            f"temperature={sampling.temperature}: sglang has none between 0 and {LOWEST_TEMPERATURE}; "
            "use greedy, or a higher one"
        )
    if sampling.repetition_penalty > LARGEST_PENALTY:
        return f"repetition_penalty={sampling.repetition_penalty}: sglang takes at most {LARGEST_PENALTY:.0f}"
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocabulary:
            return f"logit_bias holds token id {token}, and the model's vocabulary is 0..{vocabulary - 1}"
        if not math.isfinite(bias):
            return f"logit_bias of token {token} is {bias}: sglang takes finite numbers"
    if sampling.stop and not texts:
        return "stop has texts, and this sglang has no tokenizer (skip_tokenizer_init): use stop_token_ids"
    if sampling.ignore_eos and sampling.stop_token_ids and sampling.min_tokens:
        return (
            "min_tokens with ignore_eos and stop_token_ids: sglang would forbid the end token too; leave "
            "one of them out"
        )
    return None


def sglang_params(request: GenerationRequest, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """Return the `sampling_params` of /generate, the number of log-probs, and the stop tokens to look for in
    the stream here: with `ignore_eos` SGLang ignores every one.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": 0.0 if sampling.takes_argmax else sampling.temperature,
        "sampling_seed": request.seed % _SEEDS,
        "ignore_eos": sampling.ignore_eos,
        "repetition_penalty": sampling.repetition_penalty,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if not sampling.ignore_eos:
        params |= {
            "stop_token_ids": sorted({*eos_token_ids, *sampling.stop_token_ids}),
            "min_new_tokens": sampling.min_tokens,
        }
    if sampling.limits_tokens:
        params |= {
            "top_k": sampling.top_k if sampling.top_k > 0 else -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        }
    if sampling.logit_bias:
        params["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    cuts = sorted(sampling.stop_token_ids) if sampling.ignore_eos else []
    return {"sampling_params": params, "top_logprobs_num": sampling.top_log_probs, "cuts": cuts}


class SGLangEngine(PushedEngine):
    """An SGLang server with weights that are pushed."""

    def cannot(self, request: GenerationRequest) -> str | None:
        """Return why SGLang cannot serve the request, or None."""
        return sglang_problem(request.sampling, vocabulary=self._facts["vocabulary"], texts=self.texts)

    def params(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the fields of /generate besides the prompt."""
        return sglang_params(request, self.eos_token_ids)


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
