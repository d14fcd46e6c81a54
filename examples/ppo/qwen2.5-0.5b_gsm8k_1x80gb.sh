#!/bin/sh
# PPO of Qwen2.5-0.5B with a critic of the same size on GSM8K; the native engine generates.
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Hardware: 1 GPU of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 16.1 GiB while generating, 20.5 GiB while updating.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
hybridflow train --recipe ppo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=256 \
    actor_rollout_ref.rollout.n=1 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    critic.model.path="$MODEL" critic.ppo_max_token_len_per_gpu=16384 \
    trainer.experiment_name=qwen2_5-0_5b_ppo trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
