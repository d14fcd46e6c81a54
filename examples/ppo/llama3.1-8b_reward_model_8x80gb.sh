#!/bin/sh
# PPO of Llama-3.1-8B against a reward model of the same size, on the prompts of HH-RLHF; vLLM generates.
# Data: python examples/data_preprocess/preferences.py --dataset hh_rlhf --local_save_dir ~/data/hh_rlhf
# Reward model: examples/reward_model/llama3.1-8b_hh_rlhf_8x80gb.sh, merged; REWARD_MODEL is its folder.
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 37.7 GiB while updating, and 13.1 GiB of CPU memory for each; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
REWARD_MODEL=${REWARD_MODEL:-checkpoints/Llama-3.1-8B-Instruct}
DATA=${DATA:-$HOME/data/hh_rlhf}
hybridflow train --recipe ppo \
    data.train_files="$DATA/rl/train.parquet" data.val_files="$DATA/rl/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=512 data.max_prompt_length=1024 data.max_response_length=512 \
    actor_rollout_ref.rollout.n=1 actor_rollout_ref.actor.ppo_mini_batch_size=128 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    critic.model.path="$MODEL" critic.ppo_max_token_len_per_gpu=16384 \
    reward_model.enable=true reward_model.model.path="$REWARD_MODEL" \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.optimizer_offload=true actor_rollout_ref.ref.fsdp_config.param_offload=true \
    trainer.experiment_name=llama3_1-8b_rlhf trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
