#!/bin/sh
# Supervised fine-tuning of DeepSeek-LLM-7B, with the model from ModelScope.
# Data: python examples/data_preprocess/gsm8k_sft.py --local_save_dir ~/data/gsm8k_sft
# ModelScope: pip install -e '.[remote]'
# Hardware: 8 GPUs of 80 GB in one machine; not run by us on this hardware.
# Memory of a GPU by `hybridflow config --explain`, without libraries: 28.9 GiB while updating.
set -eu
export HYBRIDFLOW_USE_MODELSCOPE=True
MODEL=${MODEL:-deepseek-ai/deepseek-llm-7b-chat}
DATA=${DATA:-$HOME/data/gsm8k_sft}
hybridflow sft \
    data.train_files="$DATA/train.parquet" data.val_files="$DATA/test.parquet" \
    model.path="$MODEL" \
    data.train_batch_size=256 data.max_length=4096 \
    data.max_token_len_per_gpu=16384 optim.lr=1e-5 \
    trainer.experiment_name=deepseek-llm-7b_sft trainer.n_gpus_per_node=8 trainer.total_epochs=3 \
    "$@"
