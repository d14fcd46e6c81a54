#!/bin/sh
# GRPO of Qwen2.5-72B by LoRA on one machine, on GSM8K; the native engine generates, eight GPUs for one copy.
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 37.3 GiB while generating, 35.6 GiB while updating, and 17.1 GiB of CPU memory for each.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-72B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=1024 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 \
    actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=8 actor_rollout_ref.rollout.max_num_seqs=256 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    trainer.experiment_name=qwen2_5-72b_lora trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
