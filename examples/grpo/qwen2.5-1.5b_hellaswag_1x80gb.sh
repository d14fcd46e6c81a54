#!/bin/sh
# GRPO of Qwen2.5-1.5B on HellaSwag, with a reward of its own; the native engine generates.
# Data: python examples/data_preprocess/hellaswag.py --local_save_dir ~/data/hellaswag
# Hardware: 1 GPU of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 30.1 GiB while generating, 35.0 GiB while updating.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}
DATA=${DATA:-$HOME/data/hellaswag}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.max_num_seqs=256 reward.custom_reward_function.path=examples/rewards/choice.py \
    trainer.experiment_name=qwen2_5-1_5b_grpo trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
