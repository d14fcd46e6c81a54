#!/bin/sh
# DPO of Qwen2.5-7B on the preferences of UltraFeedback.
# Data: python examples/data_preprocess/preferences.py --dataset ultrafeedback --local_save_dir ~/data/ultrafeedback
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 31.9 GiB while updating.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-7B-Instruct}
DATA=${DATA:-$HOME/data/ultrafeedback}
hybridflow dpo --recipe dpo \
    data.train_files="$DATA/rm/train.parquet" data.val_files="$DATA/rm/test.parquet" \
    model.path="$MODEL" \
    data.train_batch_size=128 data.max_token_len_per_gpu=16384 \
    trainer.experiment_name=qwen2_5-7b_dpo trainer.n_gpus_per_node=8 \
    "$@"
