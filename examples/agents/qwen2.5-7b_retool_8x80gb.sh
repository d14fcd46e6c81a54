#!/bin/sh
# ReTool with Qwen2.5-7B: mathematics with a code interpreter; vLLM generates.
# Data: python examples/data_preprocess/dapo_math.py --local_save_dir ~/data/retool
# Interpreter: a SandboxFusion service, whose address is in SANDBOX_URL.
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 32.8 GiB while updating; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/retool}
hybridflow train --recipe retool \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/agents/retool_tools.yaml \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=18432 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.experiment_name=qwen2_5-7b_retool trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
