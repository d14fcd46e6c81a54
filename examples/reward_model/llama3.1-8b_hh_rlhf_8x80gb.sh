#!/bin/sh
# A reward model of Llama-3.1-8B from the preferences of HH-RLHF.
# Data: python examples/data_preprocess/preferences.py --dataset hh_rlhf --local_save_dir ~/data/hh_rlhf
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 29.0 GiB while updating.
set -eu
MODEL=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
DATA=${DATA:-$HOME/data/hh_rlhf}
hybridflow reward-model --recipe reward_model \
    data.train_files="$DATA/rm/train.parquet" data.val_files="$DATA/rm/test.parquet" \
    model.path="$MODEL" \
    data.train_batch_size=256 data.max_token_len_per_gpu=16384 \
    trainer.experiment_name=llama3_1-8b_rm trainer.n_gpus_per_node=8 \
    "$@"
