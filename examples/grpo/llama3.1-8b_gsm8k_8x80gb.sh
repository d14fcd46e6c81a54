#!/bin/sh
# GRPO of Llama-3.1-8B on GSM8K; vLLM generates.
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 34.8 GiB while updating; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.experiment_name=llama3_1-8b_grpo trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
