"""AIME of 1983 to 2023 to train on, and AIME 2024 to validate, as parquet; each answer is a whole number.

python examples/data_preprocess/aime.py --local_save_dir ~/data/aime
python examples/data_preprocess/aime.py --local_dataset_path ~/raw/aime --local_save_dir ~/data/aime
"""

from __future__ import annotations

from typing import Any

from rows import arguments, write_splits

DATASET = "di-zhang-fdu/AIME_1983_2024"
TEST_DATASET = "Maxwell-Jia/AIME_2024"
TEST_YEAR = "2024"
INSTRUCTION = "Think step by step. The last line of your response is `Answer: ` and the number."


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    """Return one raw row (Question or Problem, Answer, perhaps Year); None for a test year's in training."""
    low = {name.lower(): value for name, value in raw.items()}
    if split == "train" and str(low.get("year", "")) == TEST_YEAR:
        return None
    question = low["question"] if "question" in low else low["problem"]
    return {
        "data_source": f"aime_{split}",
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(int(low["answer"]))},
        "extra_info": {"split": split, "index": index, "year": str(low.get("year", TEST_YEAR))},
    }


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0], "~/data/aime")
    write_splits(convert, options, DATASET, hub_splits={"test": (TEST_DATASET, "train")})
