"""Countdown as parquet: make a number of others, each used once (reward: examples/rewards/countdown.py).

python examples/data_preprocess/countdown.py --local_save_dir ~/data/countdown
python examples/data_preprocess/countdown.py --local_dataset_path ~/raw/countdown

The hub's data has one split, whose last part is validated on.
"""

from __future__ import annotations

from typing import Any

from rows import arguments, write_splits

DATASET = "Jiayi-Pan/Countdown-Tasks-3to4"
INSTRUCTION = (
    "Use the numbers {numbers}, each of them exactly once, and + - * / with parentheses to make {target}. "
    "Think first. Then give the expression inside <answer> and </answer>, for example "
    "<answer>(1 + 2) / 3</answer>."
)


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (nums, target) as a row of the project's schema."""
    numbers = [int(number) for number in raw["nums"]]
    target = int(raw["target"])
    text = INSTRUCTION.format(numbers=numbers, target=target)
    return {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": text}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": target, "numbers": numbers}},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    parts = {"train": (DATASET, "train[:-1024]"), "test": (DATASET, "train[-1024:]")}
    write_splits(convert, arguments(__doc__.splitlines()[0], "~/data/countdown"), DATASET, hub_splits=parts)
