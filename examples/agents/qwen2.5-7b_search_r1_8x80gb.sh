#!/bin/sh
# Search-R1 with Qwen2.5-7B: questions that want a search; vLLM generates.
# Data: python examples/data_preprocess/search_r1.py --local_save_dir ~/data/search_r1
# Search: a retrieval service, whose address is in RETRIEVAL_URL.
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 33.7 GiB while updating; the engine takes up to 40 GB while generating (rollout.gpu_memory_utilization).
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/search_r1}
hybridflow train --recipe search_r1 \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=examples/agents/search_tools.yaml \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.experiment_name=qwen2_5-7b_search_r1 trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 trainer.test_freq=10 trainer.save_freq=20 \
    "$@"
