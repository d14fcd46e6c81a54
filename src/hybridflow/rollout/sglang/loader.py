"""The weight loader of SGLang's workers (`--custom-weight-loader`): it receives pushes and keeps their
version.

/update_weights_from_tensor ──receipt, as a tensor of bytes──► load ──► Receiver ◄──weights── push
                                                                └──answer──► the `Listener` that the receipt
                                                                names

It also changes the sampler of these workers: tokens are drawn by each request's own seed, and log-probs are
those of the whole distribution at the temperature alone.

SGLang itself draws from one stream for all rows (its seeds need a mode that few attention kernels have),
takes log-probs after biases and penalties, and does not count the prompt's tokens as repeated. Only what is
named here is changed, in SGLang's own processes.
"""

from __future__ import annotations

import base64
import inspect
import json
import logging
import os
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.rollout.native.sampling import draw, probability_floor, stream_keys, uniforms
from hybridflow.weight_sync.wire.channel import Channel
from hybridflow.weight_sync.wire.receiver import Receiver

logger = logging.getLogger(__name__)
QUALIFIED_NAME = f"{__name__}.load"
_RECEIVED = Receiver()
"""Weights of this process's model."""
KNOWN = "0.5.23"
"""Version of SGLang that these changes were written for."""


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load the push that the receipt names and report to its sender; never raises, which would end SGLang."""
    receipt = json.loads(bytes(named_tensors[0][1].tolist()))
    try:
        install()
        answer = _RECEIVED.receive(model.load_weights, receipt)
    except Exception as error:  # whatever it is, the sender shall read it
        answer = {"error": f"{type(error).__name__}: {error}"}
    try:
        report = Channel.connect(
            receipt["host"], receipt["report_port"], receipt["report_token"], receipt["timeout"]
        )
        report.send({**answer, "pid": os.getpid()})
        report.close()
    except (OSError, RolloutError) as error:  # the sender is gone, and its weights have no name
        logger.warning("nobody hears how a push of weights went: %s; it was: %s", error, answer)


def packed(receipt: dict[str, Any]) -> str:
    """Return a receipt in the form in which SGLang's HTTP API takes tensors."""
    data = torch.tensor(list(json.dumps(receipt).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("receipt", data)])).decode()


def install() -> None:
    """Change the sampler of this process, once; RolloutError where it is not the known one."""
    import sglang
    from sglang.srt.layers import sampler as layer
    from sglang.srt.sampling.penaltylib.repetition_penalty import BatchedRepetitionPenalizer
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    if getattr(layer.Sampler, "hybridflow_draws", False):
        return
    takes = set(inspect.signature(layer.Sampler.forward).parameters)
    has = all(hasattr(SamplingBatchInfo, name) for name in ("from_schedule_batch", "apply_logits_bias"))
    if "logprob_logits" not in takes or not hasattr(layer.Sampler, "_sample_from_probs") or not has:
        raise RolloutError(
            f"the sampler of sglang {sglang.__version__} is not the one of {KNOWN}: install sglang=={KNOWN}"
        )
    if getattr(layer, "SGLANG_RETURN_ORIGINAL_LOGPROB", False):
        raise RolloutError(
            "SGLANG_RETURN_ORIGINAL_LOGPROB is set: log-probs would not be those at the temperature; start "
            "sglang without it"
        )
    give_seeds(SamplingBatchInfo)
    keep_bare_logits(SamplingBatchInfo, layer.Sampler)
    count_prompts(BatchedRepetitionPenalizer)
    draw_by_seeds(layer.Sampler)
    layer.Sampler.hybridflow_draws = True


def give_seeds(batch_info: Any) -> None:
    """Give every batch the seeds of its rows, which SGLang sets only in its deterministic mode."""
    plain = batch_info.from_schedule_batch.__func__

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = plain(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(info.device, non_blocking=True)
        return info

    batch_info.from_schedule_batch = classmethod(from_schedule_batch)


def keep_bare_logits(batch_info: Any, sampler: Any) -> None:
    """Compute log-probs of the logits before biases and penalties."""
    shift = batch_info.apply_logits_bias
    forward = sampler.forward

    def apply_logits_bias(self: Any, logits: Tensor) -> None:
        orchestrator = self.penalizer_orchestrator
        shifts = (self.logit_bias, self.acc_additive_penalties, self.acc_scaling_penalties)
        shifted = any(each is not None for each in shifts) or (
            orchestrator is not None and orchestrator.is_required
        )
        self.hybridflow_bare = logits.clone() if shifted else None
        shift(self, logits)

    def with_bare_logits(
        self: Any, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **kwargs: Any
    ) -> Any:
        bare = getattr(sampling_info, "hybridflow_bare", None)
        if bare is not None:
            sampling_info.hybridflow_bare = None
            if return_logprob:
                kwargs["logprob_logits"] = bare
        return forward(self, logits_output, sampling_info, return_logprob, *args, **kwargs)

    batch_info.apply_logits_bias = apply_logits_bias
    sampler.forward = with_bare_logits


def count_prompts(penalizer: Any) -> None:
    """Count the prompt's tokens as repeated in the repetition penalty."""
    plain = penalizer._prepare

    def prepare(self: Any) -> None:
        plain(self)
        penalties = self.cumulated_repetition_penalties
        for row, request in enumerate(self.orchestrator.reqs()):
            if request.sampling_params.repetition_penalty != 1:
                seen = torch.tensor(
                    sorted({*request.origin_input_ids, *request.output_ids}), device=penalties.device
                )
                penalties[row, seen] = request.sampling_params.repetition_penalty

    penalizer._prepare = prepare


def draw_by_seeds(sampler: Any) -> None:
    """Draw by one number for each (seed, position), as the native engine, but for rows with a mask."""
    plain = sampler._sample_from_probs

    def sample_from_probs(self: Any, probs: Tensor, info: Any, positions: Tensor, simple: bool) -> Any:
        if info.sampling_seed is None or info.sampling_mask_batch_indices is not None:
            return plain(self, probs, info, positions, simple)
        return drawn(probs, info, positions, simple=simple).to(torch.int32), None

    sampler._sample_from_probs = sample_from_probs


def drawn(probs: Tensor, info: Any, positions: Tensor, *, simple: bool) -> Tensor:
    """Draw tokens [B] from probabilities [B, V]; `simple`: no row limits its tokens."""
    weights = probs.float()
    if not simple:
        if info.need_min_p_sampling:
            weights = weights * (weights >= (info.min_ps * weights.amax(-1))[:, None])
        if info.need_top_k_sampling or info.need_top_p_sampling:
            floor = probability_floor(weights, info.top_ks.long().clamp(max=weights.shape[-1]), info.top_ps)
            weights = weights * (weights >= floor[:, None])
    return draw(weights, uniforms(stream_keys(info.sampling_seed), positions.long()))
