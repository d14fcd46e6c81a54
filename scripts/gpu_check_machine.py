"""What the machine of a GPU check has, and what is missing: driver, devices, torch, the commit of the clone.

Standard library only: this runs before anything is installed.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OLDEST_TORCH = (2, 11)


def driver_facts() -> dict[str, Any]:
    """Return what nvidia-smi says of driver and devices, and the error where it says nothing."""
    query = "name,driver_version,memory.total,compute_cap"
    found: dict[str, Any] = {"version": "", "devices": [], "error": ""}
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        found["error"] = f"nvidia-smi: {error}"
        return found
    if said.returncode != 0:
        found["error"] = f"nvidia-smi: {(said.stderr or said.stdout).strip()[:300]}"
        return found
    for line in said.stdout.splitlines():
        name, version, memory, capability = (part.strip() for part in line.rsplit(",", 3))
        found["version"] = version
        found["devices"].append({"name": name, "memory": memory, "capability": capability})
    return found


def environment_facts(python: str, *words: str) -> dict[str, Any]:
    """Return what gpu_check_device.py prints under that Python."""
    script = str(Path(__file__).with_name("gpu_check_device.py"))
    try:
        said = subprocess.run([python, script, *words], capture_output=True, text=True, timeout=300)
        found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {
            "torch": {"error": f"{python} could not be asked: {error}"},
            "versions": {},
            "engine_errors": {},
        }
    return found


def missing_driver(driver: dict[str, Any]) -> str:
    """Return the sentence about a driver that shows no device."""
    said = driver["error"] or "its list is empty"
    return (
        f"nvidia-smi shows no device ({said}): install NVIDIA's driver, or in a container start it with "
        "`--gpus all`. Where torch sees a GPU without nvidia-smi, name its Python: --python PYTHON."
    )


def missing(driver: dict[str, Any], torch: dict[str, Any], python: str) -> list[str]:
    """Return what keeps the check from running on a GPU, in whole sentences that say what to do."""
    if "error" in torch:
        return [
            f"torch cannot be imported by {python} ({torch['error']}): install a CUDA build of torch 2.11 or "
            "newer."
        ]
    told = []
    version = torch["version"]
    if release_of(version) < OLDEST_TORCH:
        told.append(f"torch is {version}, and {'.'.join(map(str, OLDEST_TORCH))} or newer is wanted.")
    if torch["cuda"] is None:
        told.append(
            f"torch {version} is not a CUDA build: install one, as pytorch.org/get-started/locally names it "
            "for your driver, or give this command its index: --torch-index URL."
        )
    elif not torch["available"]:
        told.append(
            f"torch {version} is built for CUDA {torch['cuda']} and sees no device "
            f"({torch.get('why', 'no reason')}): the driver ({driver['version'] or 'none'}) may be too old "
            "for it. Update the driver, or take a build for an older CUDA: --torch-index URL."
        )
    if not torch["available"] and not driver["devices"]:
        told.insert(0, missing_driver(driver))
    return told


def release_of(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) where it has none."""
    parts = version.split("+")[0].split(".")[:2]
    return (int(parts[0]), int(parts[1])) if len(parts) == 2 and all(map(str.isdigit, parts)) else (0, 0)


def commit() -> str:
    """Return the commit of the clone, and whether files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown: this is no git clone"
    return f"{head}, with changes" if changed else head


def _git(*words: str) -> str:
    said = subprocess.run(
        ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=60
    )
    return said.stdout.strip()
