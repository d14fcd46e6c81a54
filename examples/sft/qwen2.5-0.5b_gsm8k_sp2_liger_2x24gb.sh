#!/bin/sh
# Supervised fine-tuning of Qwen2.5-0.5B on GSM8K; two GPUs share the tokens of a row, and Liger's kernels compute.
# Data: python examples/data_preprocess/gsm8k_sft.py --local_save_dir ~/data/gsm8k_sft
# Liger: pip install -e '.[liger]'
# Hardware: 2 GPUs of 24 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 8.6 GiB while updating.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k_sft}
hybridflow sft \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    model.path="$MODEL" \
    data.train_batch_size=256 data.max_length=2048 \
    engine.ulysses_sequence_parallel_size=2 model.use_liger=true \
    data.max_token_len_per_gpu=16384 optim.lr=1e-5 \
    trainer.experiment_name=qwen2_5-0_5b_sft trainer.n_gpus_per_node=2 trainer.total_epochs=3 \
    "$@"
