"""GSM8K as parquet, for a model that may have its answers checked by the tool calc_gsm8k_reward.

python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k_tools
python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dataset_path ~/raw/gsm8k

The rows also have what the interaction gsm8k needs, a user who says whether the answer is right.
"""

from __future__ import annotations

from typing import Any

import gsm8k
from rows import arguments, write_splits

SYSTEM = (
    "You are good at mathematics. Solve the question step by step, and reason before each call of a tool. "
    "Before you give your final answer, have it checked by the tool `calc_gsm8k_reward` at least once, and "
    "correct it where it is wrong. Write the final answer as `#### <answer>`."
)


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (question, answer) as a row whose tool and whose user know the answer."""
    row = gsm8k.convert(raw, split, index)
    truth = row["reward_model"]["ground_truth"]
    row["prompt"] = [{"role": "system", "content": SYSTEM}, *row["prompt"]]
    row["extra_info"] |= {
        "need_tools_kwargs": True,
        "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}},
        "interaction_kwargs": {"name": "gsm8k", "query": row["prompt"][1]["content"], "ground_truth": truth},
    }
    return row


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0], "~/data/gsm8k_tools")
    write_splits(convert, options, gsm8k.DATASET, gsm8k.CONFIG)
