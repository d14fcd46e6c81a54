#!/bin/sh
# GRPO of SmolLM2-360M on GSM8K; the native engine generates.
# Data: python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
# Hardware: 1 GPU of 24 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 15.5 GiB while generating, 10.8 GiB while updating.
set -eu
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-360M-Instruct}
DATA=${DATA:-$HOME/data/gsm8k}
hybridflow train --recipe grpo \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    data.train_batch_size=128 data.max_prompt_length=512 data.max_response_length=512 \
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 \
    trainer.experiment_name=smollm2-360m_grpo trainer.nnodes=1 trainer.n_gpus_per_node=1 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
