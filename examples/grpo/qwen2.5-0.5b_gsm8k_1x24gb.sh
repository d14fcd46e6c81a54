#!/bin/sh
# GRPO of Qwen2.5-0.5B on GSM8K; the native engine generates.
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Hardware: 1 GPU of 24 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 12.0 GiB while generating, 13.2 GiB while updating.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.max_num_seqs=256 \
    trainer.experiment_name=qwen2_5-0_5b_grpo trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
