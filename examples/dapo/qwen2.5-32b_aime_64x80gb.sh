#!/bin/sh
# DAPO of Qwen2.5-32B on AIME; the native engine generates, eight GPUs for each copy.
# Data: python examples/data_preprocess/aime.py --local_save_dir ~/data/aime
# Cluster: start Ray on all machines and set RAY_ADDRESS (docs/cluster/README.md).
# Hardware: 64 GPUs of 80 GB in 8 machines; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 50.5 GiB while generating, 34.6 GiB while updating, and 5.7 GiB of CPU memory for each.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
DATA=${DATA:-$HOME/data/aime}
hybridflow train --recipe dapo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=512 data.gen_batch_size=1536 data.max_prompt_length=2048 data.max_response_length=8192 \
    actor_rollout_ref.rollout.n=16 actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.optimizer_offload=true actor_rollout_ref.ref.fsdp_config.param_offload=true \
    actor_rollout_ref.rollout.max_num_seqs=128 \
    trainer.experiment_name=qwen2_5-32b_dapo trainer.nnodes=8 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
