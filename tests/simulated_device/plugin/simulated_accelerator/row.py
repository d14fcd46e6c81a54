"""The row of the simulated accelerator in the table of accelerators. No torch is imported here.

The variable SIMULATED_DEVICE says which kind it is: `gpu` (the default) records steps, pins memory and has
attention over rows of any length, as CUDA; `npu` has none of it.
"""

from __future__ import annotations

import os

from hybridflow.distributed.accelerators import Accelerator

KIND = os.environ.get("SIMULATED_DEVICE", "gpu")

ROW = Accelerator(
    "sim",
    "simulated device",
    "SIM",
    "gloo",
    (),
    package="simulated_accelerator",
    dtype="float32",
    pins_memory=KIND == "gpu",
    records_steps=KIND == "gpu",
    varlen_attention=KIND == "gpu",
    facilities="simulated_accelerator.graphs:SimulatedFacilities",
)
