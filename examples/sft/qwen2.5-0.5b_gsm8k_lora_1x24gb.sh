#!/bin/sh
# Supervised fine-tuning of Qwen2.5-0.5B by LoRA on GSM8K.
# Data: python examples/data_preprocess/gsm8k_sft.py --local_save_dir ~/data/gsm8k_sft
# Hardware: 1 GPU of 24 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 5.3 GiB while updating.
set -eu
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
DATA=${DATA:-$HOME/data/gsm8k_sft}
hybridflow sft \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    model.path="$MODEL" \
    data.train_batch_size=256 data.max_length=2048 \
    model.lora_rank=32 model.lora_alpha=16 optim.lr=1e-4 \
    data.max_token_len_per_gpu=8192 \
    trainer.experiment_name=qwen2_5-0_5b_sft trainer.n_gpus_per_node=1 trainer.total_epochs=3 \
    "$@"
