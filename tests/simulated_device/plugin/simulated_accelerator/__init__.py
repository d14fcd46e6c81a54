"""A simulated accelerator: torch's device `sim`, strict where a GPU is silent.

    operator ──dispatch──► the CPU's kernel on the same bytes     mixing host and device is an error
         │                     │
       counts               memory (storages, peaks)   timeline (streams, events, copies on their way)

Its tensors are real tensors of torch's free device type over host memory, so views, storages, parameters,
autograd and checkpoints are torch's own. Importing the package registers the device; a process has one of
them. `counts` says what was launched, copied and waited for, and by which line; `fault` raises what a GPU
would do silently wrong.
"""

from __future__ import annotations

from simulated_accelerator import module  # noqa: F401  (registers the device; before kernels of it can be)

from simulated_accelerator import collectives, dispatch, kernels, pinned, sharding  # isort: skip # noqa: F401
