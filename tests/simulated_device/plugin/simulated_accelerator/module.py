"""The module `torch.sim`: what torch and the product ask of a device's module. Importing it registers it."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import backend_registration

DEVICES = int(os.environ.get("SIMULATED_DEVICES", "1"))
"""Number of devices that the machine shows. A process computes on the first, as where Ray shows it one."""


class DeviceModule:
    """One device: memory, streams and events, random state."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def init(self) -> None:
        pass

    def device_count(self) -> int:
        return DEVICES

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def device(self, device: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_device_name(self, device: Any = None) -> str:
        return "simulated accelerator"

    # random numbers: the host's, since its kernels draw them

    def manual_seed_all(self, seed: int) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    # streams

    @property
    def Event(self) -> type:
        from simulated_accelerator import timeline

        return timeline.Event

    @property
    def Stream(self) -> type:
        from simulated_accelerator import timeline

        return timeline.Stream

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else stream

    def current_stream(self, device: Any = None) -> Any:
        from simulated_accelerator import timeline

        return timeline.current()

    def default_stream(self, device: Any = None) -> Any:
        from simulated_accelerator import timeline

        return timeline.default

    def set_stream(self, stream: Any) -> None:
        from simulated_accelerator import timeline

        timeline._local.stream = stream

    def synchronize(self, device: Any = None) -> None:
        from simulated_accelerator import timeline

        timeline.wait_for_all()

    # memory

    def empty_cache(self) -> None:
        pass

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        from simulated_accelerator import memory

        return memory.numbers()

    def memory_allocated(self, device: Any = None) -> int:
        from simulated_accelerator import memory

        return memory.taken()

    memory_reserved = memory_allocated

    def max_memory_allocated(self, device: Any = None) -> int:
        from simulated_accelerator import memory

        return memory.peak()

    max_memory_reserved = max_memory_allocated

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        from simulated_accelerator import memory

        memory.reset_peak()

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {"num_alloc_retries": 0, "allocated_bytes.all.current": self.memory_allocated()}


backend_registration._setup_privateuseone_for_python_backend("sim", backend_module=DeviceModule())
SIM = torch.device("sim", 0)
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
