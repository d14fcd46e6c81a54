"""What vLLM's worker gets from us (`worker_extension_cls`): it takes weights in, and keeps log-probs of the whole distribution.

vLLM mixes this class into its own worker, so `self` has `reload_weights`, `model_runner` and `vllm_config`. It imports nothing of vllm.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hybridflow.rollout.push.receiver import NOTHING, Receiver

QUALIFIED_NAME = f"{__name__}.Extension"
_GREEDY_BELOW = 1e-5
"""Temperatures that vLLM takes for greedy."""


class Extension:
    """Methods that `collective_rpc` calls on each worker; their names are ours alone."""

    vllm_config: Any
    model_runner: Any

    def hybridflow_begin(self) -> dict[str, Any]:
        """Prepare the worker, once or again; what the driver must know of it."""
        config = self.vllm_config
        return {
            "pid": os.getpid(),
            "device": str(getattr(self, "device", "cpu")),
            "vocabulary": int(config.model_config.get_vocab_size()),
            "positions": int(config.model_config.max_model_len),
            "max_log_probs": int(config.model_config.max_logprobs),
            "temperature_only": self._hybridflow_whole_distribution(),
        }

    def hybridflow_version(self) -> dict[str, Any]:
        """The version of the weights in this worker, `NOTHING` before the first whole push."""
        return {"version": self._hybridflow_receiver().version}

    def hybridflow_checksums(self) -> dict[str, Any]:
        """Of each tensor of the newest push as it arrived here."""
        return {"version": self._hybridflow_receiver().version, "checksums": self._hybridflow_receiver().checksums}

    def hybridflow_forget(self) -> dict[str, Any]:
        """The weights are gone (sleep of level 2): none of them may generate until they are pushed again."""
        self._hybridflow_receiver().version = NOTHING
        return {}

    def hybridflow_receive(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Fetch a push from another process."""
        return self._hybridflow_receiver().receive(self._hybridflow_load, receipt)

    def hybridflow_take(self, weights: Iterable[tuple[str, Tensor, int]], version: int) -> None:
        """Take a push of this process: (name, tensor, its checksum)."""
        self._hybridflow_receiver().take(self._hybridflow_load, weights, version)

    def _hybridflow_receiver(self) -> Receiver:
        if not hasattr(self, "_hybridflow_received"):
            self._hybridflow_received = Receiver()
        return self._hybridflow_received

    def _hybridflow_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        worker: Any = self
        failed: list[Exception] = []

        def to_the_end() -> Iterator[tuple[str, Tensor]]:
            """An error in the middle would leave vLLM's layers taken apart, and the next push could not put them together."""
            try:
                yield from weights
            except Exception as error:
                failed.append(error)

        worker.reload_weights(weights_iterator=to_the_end())  # and not load_weights: on CPU linear layers are packed, their weights gone
        if failed:
            raise failed[0]

    def _hybridflow_whole_distribution(self) -> bool:
        """Make the sampler keep log-probs at the temperature alone; False where this vLLM's sampler is another than the one known here."""
        sampler = getattr(self.model_runner, "sampler", None)
        if getattr(sampler, "hybridflow_whole", False):
            return True
        inner = getattr(sampler, "topk_topp_sampler", None)
        known = hasattr(sampler, "compute_logprobs") and hasattr(sampler, "logprobs_mode") and hasattr(inner, "logprobs_mode")
        if sampler is None or not known or getattr(self.vllm_config, "speculative_config", None) is not None:
            return False
        keep_whole_distribution(sampler)
        return True


def keep_whole_distribution(sampler: Any) -> None:
    """Change a vLLM sampler so that its log-probs are those of logits / temperature (greedy rows: of the logits), as training computes.

    Its own are either of the bare logits, or of what top-k, top-p, penalties and biases leave of them.
    """
    plain = sampler.forward
    temperatures: list[Tensor | None] = [None]

    def forward(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        temperatures[0] = sampling_metadata.temperature
        return plain(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(logits: Tensor) -> Tensor:
        scaled, temperature = logits.float(), temperatures[0]
        if temperature is not None:
            scaled = scaled / torch.where(temperature < _GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        return scaled.log_softmax(-1)

    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"  # computed first, before logits are processed
    sampler.forward, sampler.compute_logprobs, sampler.hybridflow_whole = forward, compute_logprobs, True
