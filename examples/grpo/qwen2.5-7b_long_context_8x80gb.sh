#!/bin/sh
# GRPO of Qwen2.5-7B with answers of up to 30,000 tokens: four GPUs share the tokens of a row (Ulysses).
# Data: python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 21.5 GiB while updating, and 12.4 GiB of CPU memory for each; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/math}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=128 data.max_prompt_length=2048 data.max_response_length=30000 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 actor_rollout_ref.ref.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.optimizer_offload=true actor_rollout_ref.ref.fsdp_config.param_offload=true \
    trainer.experiment_name=qwen2_5-7b_grpo trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
