#!/bin/sh
# Make .venv-sglang, on a CPU: SGLang's own Python engine with its kernel package stubbed, on top of .venv-vllm (scripts/setup_vllm.sh).
# No CPU build of SGLang's kernels (sglang-kernel) is published, so `sgl_kernel` is a stub whose every function raises when it is called, and
# `torchvision` one that text models import and do not use. Plain models (Llama, Qwen2) call no such kernel; others may. It takes 2 GB, once.
# On CUDA use an ordinary environment with sglang instead: pip install -e '.[sglang]'.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv-sglang}
BASE=${BASE:-.venv-vllm}
VERSION=0.5.23  # what the tests were run with, and whose sampler hybridflow.rollout.sglang.loader knows
BIN=$VENV/bin
test -e "$BASE/.ready" || VENV=$BASE scripts/setup_vllm.sh
test -x "$BIN/python" || "$BASE/bin/python" -m venv "$VENV"
SITE=$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$BASE/bin/python" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > "$SITE/base.pth"
PINNED=$(mktemp)
trap 'rm -f "$PINNED"' EXIT
"$BIN/python" -m pip freeze --exclude-editable | grep -iE '^(torch|transformers|tokenizers|numpy)==' > "$PINNED"
"$BIN/python" -m pip install --quiet --no-deps "sglang==$VERSION" triton
"$BIN/python" -m pip install --quiet --constraint "$PINNED" \
    orjson ipython traitlets easydict blobfile datasets gguf modelscope soundfile xxhash
for PACKAGE in sgl_kernel torchvision; do
    mkdir -p "$SITE/$PACKAGE"
    cp scripts/stub_package.py "$SITE/$PACKAGE/__init__.py"
done
touch "$VENV/.ready"
