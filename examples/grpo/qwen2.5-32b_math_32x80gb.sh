#!/bin/sh
# GRPO of Qwen2.5-32B on MATH over four machines; the native engine generates, eight GPUs for each copy.
# Data: python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
# Cluster: start Ray on all machines and set RAY_ADDRESS (docs/cluster/README.md).
# Hardware: 32 GPUs of 80 GB in 4 machines; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 34.4 GiB while generating, 30.8 GiB while updating, and 13.3 GiB of CPU memory for each.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
DATA=${DATA:-$HOME/data/math}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=2048 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.optimizer_offload=true actor_rollout_ref.ref.fsdp_config.param_offload=true \
    trainer.experiment_name=qwen2_5-32b_grpo trainer.nnodes=4 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
