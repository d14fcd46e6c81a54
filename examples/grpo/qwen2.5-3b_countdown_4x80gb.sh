#!/bin/sh
# GRPO of Qwen2.5-3B on Countdown, as TinyZero has it, with a reward of its own; vLLM generates.
# Data: python examples/data_preprocess/countdown.py --local_save_dir ~/data/countdown
# Hardware: 4 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 22.8 GiB while updating; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-$HOME/data/countdown}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=256 data.max_prompt_length=256 data.max_response_length=1024 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    reward.custom_reward_function.path=examples/rewards/countdown.py \
    trainer.experiment_name=qwen2_5-3b_grpo trainer.nnodes=1 trainer.n_gpus_per_node=4 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
