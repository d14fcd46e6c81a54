#!/bin/sh
# GRPO of Qwen2.5-3B on GSM8K over several turns, with a tool that checks answers; vLLM generates.
# Data: python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tools
# Hardware: 4 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 22.8 GiB while updating; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k_tools}
hybridflow train --recipe gsm8k_tools \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/agents/gsm8k_tools.yaml \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.experiment_name=qwen2_5-3b_gsm8k_tools trainer.nnodes=1 trainer.n_gpus_per_node=4 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
