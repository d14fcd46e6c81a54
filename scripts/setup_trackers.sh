#!/bin/sh
# Make .venv-trackers, an environment with the libraries of all trackers and this project. It takes minutes and 2 GB, once.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv-trackers}
BIN=$VENV/bin
test -x "$BIN/python" || "$PYTHON" -m venv "$VENV"
"$BIN/python" -m pip install --quiet torch==2.13.0
HELD=$(mktemp -d)
trap 'rm -rf "$HELD"' EXIT
grep -E '^(torch|transformers|tokenizers|tensordict|huggingface_hub)==' constraints.txt > "$HELD/pinned.txt"
# What the tests were run with. mlflow wants graphql-core below 3.3, which newer gql of weave refuse: 4.0.0 takes both.
cat > "$HELD/trackers.txt" <<'TXT'
clearml==2.1.12
gql[httpx]==4.0.0
graphql-core==3.2.14
mlflow==3.17.2
opentelemetry-exporter-otlp-proto-http==1.45.2
swanlab==0.10.3
tensorboard==2.21.0
trackio==0.43.0
wandb==0.31.0
weave==0.54.0
TXT
"$BIN/python" - > "$HELD/ours.txt" <<'PY'
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"]["test"]]))
PY
"$BIN/python" -m pip install --quiet --constraint "$HELD/pinned.txt" --requirement "$HELD/ours.txt"
# one by one: together the resolver searches for long
while read -r PACKAGE; do
    "$BIN/python" -m pip install --quiet --constraint "$HELD/pinned.txt" "$PACKAGE"
done < "$HELD/trackers.txt"
"$BIN/python" -m pip check
"$BIN/python" -m pip install --quiet --no-deps --editable .
touch "$VENV/.ready"
