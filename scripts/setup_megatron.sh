#!/bin/sh
# Make .venv-megatron, an environment with megatron-core and this project. It takes minutes and 1 GB, once.
# On CUDA use an ordinary environment with the package instead: pip install --no-deps megatron-core.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-megatron}
VERSION=0.16.1  # what the tests were run with, and the newest for Python 3.11
BIN=$VENV/bin
test -x "$BIN/python" || "$PYTHON" -m venv "$VENV"
"$BIN/python" -m pip install --quiet torch==2.13.0
HELD=$(mktemp -d)
trap 'rm -rf "$HELD"' EXIT
grep -E '^(torch|transformers|tokenizers|tensordict|huggingface_hub)==' constraints.txt > "$HELD/pinned.txt"
"$BIN/python" - > "$HELD/ours.txt" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = project["dependencies"]
for extra in ("ray", "test"):
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
PY
"$BIN/python" -m pip install --quiet --constraint "$HELD/pinned.txt" --requirement "$HELD/ours.txt"
"$BIN/python" -m pip install --quiet --no-deps "megatron-core==$VERSION"
"$BIN/python" -m pip install --quiet --no-deps --editable .
touch "$VENV/.ready"
