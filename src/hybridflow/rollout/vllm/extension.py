"""The extension of vLLM's workers (`worker_extension_cls`): it receives weights, and keeps log-probs of the
whole distribution.

vLLM mixes this class into its own worker, so `self` has `reload_weights`, `add_lora`, `model_runner` and
`vllm_config`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.models.adapters.adapter_folder import CONFIG, write_adapter_weights
from hybridflow.weight_sync.wire.receiver import Load, Part, Receiver, Summed, Weights
from hybridflow.weight_sync.wire.transports import memory_folder

QUALIFIED_NAME = f"{__name__}.Extension"
ADAPTER_NAME = "policy-adapter"
"""Name of the pushed adapter, by which requests ask for it."""
ADAPTER_ID = 1
"""vLLM's id of the adapter, where no server gives it another."""
_GREEDY_BELOW = 1e-5
"""Temperatures below it are greedy for vLLM."""


class Extension:
    """Methods that `collective_rpc` calls on each worker, with a prefix that none of vLLM's own has."""

    vllm_config: Any
    model_runner: Any
    _hybridflow_folder: Path
    """Folder of the worker's adapter that changes nothing."""

    def hybridflow_begin(self) -> dict[str, Any]:
        """Prepare the worker and return the facts that the driver needs; a second call changes nothing."""
        config = self.vllm_config
        return {
            "pid": os.getpid(),
            "device": str(getattr(self, "device", "cpu")),
            "vocabulary": int(config.model_config.get_vocab_size()),
            "positions": int(config.model_config.max_model_len),
            "max_log_probs": int(config.model_config.max_logprobs),
            "temperature_only": self._hybridflow_whole_distribution(),
            "adapters": getattr(config, "lora_config", None) is not None,
            "quantized": self._hybridflow_quantized(),
        }

    def _hybridflow_quantized(self) -> bool:
        """Return whether any layer computes with quantised weights: vLLM may leave all as they are."""
        methods = (getattr(module, "quant_method", None) for module in self.model_runner.model.modules())
        return any(
            method is not None and not type(method).__name__.startswith("Unquantized") for method in methods
        )

    def hybridflow_version(self) -> dict[str, Any]:
        """Return the version of this worker's weights (or `NOTHING`), and whether adapters may be pushed."""
        receiver = self._hybridflow_receiver()
        return {"version": receiver.version, "has_base": receiver.has_base}

    def hybridflow_forget(self) -> dict[str, Any]:
        """Mark the weights as dropped (sleep of level 2): no generation until they are pushed again."""
        self._hybridflow_receiver().forget()
        return {}

    def hybridflow_receive(self, receipt: dict[str, Any]) -> dict[str, Any]:
        """Fetch a push from another process."""
        return self._hybridflow_receiver().receive(self._hybridflow_loader(receipt.get("adapter")), receipt)

    def hybridflow_take(
        self, weights: Summed, version: int, part: Part = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        """Load weights of this process; `adapter`: the content of adapter_config.json, for adapters."""
        self._hybridflow_receiver().take(self._hybridflow_loader(adapter), weights, version, part)

    def hybridflow_empty_adapter(self) -> dict[str, Any]:
        """Return the folder of an adapter that changes nothing, from which a server learns the name."""
        manager = self.model_runner.lora_manager._adapter_manager
        name, module = next(
            (name, module)
            for name, module in manager.modules.items()
            if name.rsplit(".", 1)[-1] not in manager.packed_modules_mapping
            and hasattr(module.base_layer, "input_size")
        )
        zeros = {
            f"{name}.lora_A": torch.zeros(1, module.base_layer.input_size),
            f"{name}.lora_B": torch.zeros(module.base_layer.output_size, 1),
        }
        folder = self._hybridflow_folder = Path(tempfile.mkdtemp(prefix="hybridflow_adapter_"))
        _write_adapter(folder, {"r": 1, "lora_alpha": 1, "target_modules": [name.rsplit(".", 1)[-1]]}, zeros)
        return {"folder": str(folder)}

    def hybridflow_adapter_ready(self) -> dict[str, Any]:
        """Delete that folder, so that requests before the first push fail; returns the adapter's id."""
        shutil.rmtree(self._hybridflow_folder, ignore_errors=True)
        worker: Any = self
        self._hybridflow_adapter_id = max(worker.list_loras(), default=ADAPTER_ID)
        return {"id": self._hybridflow_adapter_id}

    def _hybridflow_loader(self, adapter: dict[str, Any] | None) -> Load:
        if adapter is None:
            return self._hybridflow_load
        return partial(self._hybridflow_load_adapter, adapter=adapter)

    def _hybridflow_load_adapter(self, weights: Weights, adapter: dict[str, Any]) -> None:
        """Load adapters by vLLM's own loader, which checks them."""
        from vllm.lora.request import LoRARequest

        worker: Any = self
        with tempfile.TemporaryDirectory(prefix="hybridflow_adapter_", dir=memory_folder()) as folder:
            _write_adapter(Path(folder), adapter, dict(weights))
            number = getattr(self, "_hybridflow_adapter_id", ADAPTER_ID)
            try:
                worker.add_lora(LoRARequest(ADAPTER_NAME, number, folder, load_inplace=True))
            except Exception as error:  # the base is as it was
                raise RolloutError(
                    f"vllm did not take the adapters: {type(error).__name__}: {error}"
                ) from error

    def _hybridflow_receiver(self) -> Receiver:
        if not hasattr(self, "_hybridflow_received"):
            self._hybridflow_received = Receiver()
        return self._hybridflow_received

    def _hybridflow_load(self, weights: Weights) -> None:
        worker: Any = self
        failed: list[Exception] = []

        def to_the_end() -> Iterator[tuple[str, Tensor]]:
            """Yield all weights and keep an error for later: now it would leave vLLM's layers incomplete."""
            try:
                yield from weights
            except Exception as error:
                failed.append(error)

        # and not load_weights: on CPU linear layers are packed, their weights gone
        worker.reload_weights(weights_iterator=to_the_end())
        if failed:
            raise failed[0]

    def _hybridflow_whole_distribution(self) -> bool:
        """Make the sampler keep log-probs at the temperature alone; returns False for an unknown sampler."""
        sampler = getattr(self.model_runner, "sampler", None)
        if getattr(sampler, "hybridflow_whole", False):
            return True
        inner = getattr(sampler, "topk_topp_sampler", None)
        known = (
            hasattr(sampler, "compute_logprobs")
            and hasattr(sampler, "logprobs_mode")
            and hasattr(inner, "logprobs_mode")
        )
        if sampler is None or not known or getattr(self.vllm_config, "speculative_config", None) is not None:
            return False
        keep_whole_distribution(sampler)
        return True


def _write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write an adapter folder in peft's format."""
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", **config}), encoding="utf-8")
    write_adapter_weights(folder, tensors)


def keep_whole_distribution(sampler: Any) -> None:
    """Change a vLLM sampler so that its log-probs are those of logits / temperature, as in training, and in
    greedy rows those of the logits. vLLM's own are of bare logits, or of logits after all that changes them.
    """
    plain = sampler.forward
    temperatures: list[Tensor | None] = [None]

    def forward(logits: Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        temperatures[0] = sampling_metadata.temperature
        return plain(logits, sampling_metadata, *args, **kwargs)

    def compute_logprobs(logits: Tensor) -> Tensor:
        scaled = logits.float()
        temperature = temperatures[0]
        if temperature is not None:
            scaled = scaled / torch.where(temperature < _GREEDY_BELOW, 1.0, temperature).unsqueeze(1)
        return scaled.log_softmax(-1)

    # computed first, before logits are processed
    sampler.logprobs_mode = sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"
    sampler.forward = forward
    sampler.compute_logprobs = compute_logprobs
    sampler.hybridflow_whole = True
