"""Weights are pushed as they are in training, and vLLM quantises them as they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_vllm_engines import PROMPTS, run
from vllm_models import EOS, log_probs, tiny, weights

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.vllm.build import build_vllm_engine
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.rollout.vllm.in_process import InProcess

MEAN_APART = 0.25
"""Nats by which rounding to eight bits moves log-probs of this model, on average; another model's are further
away.
"""


def build(folder: str, method: str) -> VLLMEngine:
    config = RolloutConfig(
        name="vllm", max_model_len=128, max_num_seqs=64, dtype="bfloat16", quantization=method
    )
    return build_vllm_engine(config, ModelFacts(folder, torch.device("cpu"), "float32"), [EOS])


def apart(hf: Any, engine: VLLMEngine) -> float:
    given = zip(PROMPTS, run(engine, temperature=1.0), strict=True)
    rows = [
        (torch.tensor(output.log_probs) - log_probs(hf, prompt, output.token_ids, 1.0)).abs()
        for prompt, output in given
    ]
    return float(torch.cat(rows).mean())


def test_each_push_is_quantised(folder: str) -> None:
    engine = build(folder, "fp8_per_channel")
    for version, seed in ((1, 0), (2, 1)):
        hf = tiny(seed)
        engine.update_weights(weights(hf), version)
        assert 1e-3 < apart(hf, engine) < MEAN_APART
        assert apart(tiny(1 - seed), engine) > 2 * MEAN_APART, "the other weights"
    assert isinstance(engine.runner, InProcess)
    worker = engine.runner._engine.model_executor.driver_worker
    model = getattr(worker, "worker", worker).model_runner.model
    kinds = {parameter.dtype for name, parameter in model.named_parameters() if name.endswith("_proj.weight")}
    assert kinds == {torch.float8_e4m3fn}
    engine.close()


def test_a_method_that_quantises_nothing_is_refused(folder: str) -> None:
    with pytest.raises(RolloutError, match="quantises no layer"):
        build(folder, "int8_per_channel_weight_only")  # on a CPU vLLM takes it, for experts only
