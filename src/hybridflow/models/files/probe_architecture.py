"""The probe of a sharded model's architecture, on a small second model with random weights.

The probe runs rows through transformers' eager attention, which calls submodules that only the model's own
forward would gather. It tests the architecture and not the weights, so a model with the first layers of each
kind and a small vocabulary gives the same answer.
"""

from __future__ import annotations

import copy
import logging

import torch
from transformers import PretrainedConfig

from hybridflow.distributed.accelerators import is_accelerator
from hybridflow.models.files.build import auto_class, count_parameters
from hybridflow.models.files.probe import probe_policy
from hybridflow.models.liger import use_liger_kernels
from hybridflow.models.parallel.stages import check_stages
from hybridflow.models.policy import PolicyModel

logger = logging.getLogger(__name__)

MAX_PARAMETERS = 2_000_000_000
_VOCABULARY = 512


def probe_architecture(
    config: PretrainedConfig,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    use_liger: bool = False,
    in_stages: bool = False,
) -> float | None:
    """Run `probe_policy` on a small float32 model of the architecture that `config` describes.

    With `in_stages` it is also run in two parts. Returns its difference in nats, or None for too large a
    model. The random stream stays as it was.
    """
    small = small_config(config)
    size = count_parameters(small, trust_remote_code=trust_remote_code)
    if size > MAX_PARAMETERS:
        logger.info(
            "a layer of %s is too large to probe apart from the model (%.1f B parameters)",
            config.model_type,
            size / 1e9,
        )
        return None
    devices = [each for each in (device,) if is_accelerator(each.type)]
    kind = next((each.type for each in devices), "cpu")  # whose random state is always kept
    with torch.random.fork_rng(devices=devices, device_type=kind):
        torch.manual_seed(0)
        hf = (
            auto_class("policy", small)
            .from_config(
                small, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
            )
            .to(device)
        )
    policy = PolicyModel(hf.eval())
    if use_liger:
        use_liger_kernels(policy)
    if in_stages:
        check_stages(policy)
    return probe_policy(policy)


def small_config(config: PretrainedConfig) -> PretrainedConfig:
    """Return a configuration of the same architecture with fewer layers and tokens.

    Its weights are so large that attention moves the log-probs.
    """
    small = copy.deepcopy(config)
    text = small.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or [])
    wanted = max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)
    layers = min(text.num_hidden_layers, max(2, wanted))
    text.num_hidden_layers = layers
    if kinds:
        text.layer_types = kinds[:layers]
    text.vocab_size = min(text.vocab_size, _VOCABULARY)
    text.pad_token_id = None
    text.initializer_range = float(text.hidden_size) ** -0.5
    return small
