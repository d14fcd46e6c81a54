"""GSM8K as parquet: grade-school word problems whose answers end in `#### number`.

python examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k
python examples/data_preprocess/gsm8k.py --local_dataset_path ~/raw/gsm8k --local_save_dir ~/data/gsm8k
"""

from __future__ import annotations

import re
from typing import Any

from rows import arguments, write_splits

DATASET = "openai/gsm8k"
CONFIG = "main"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
_FINAL = re.compile(r"####\s*(-?[0-9.,]+)")


def final_answer(answer: str) -> str:
    """Return the number after `####`, without thousands separators. Raises ValueError where there is none."""
    found = _FINAL.search(answer)
    if found is None:
        raise ValueError(f"no '#### number' in the answer {answer[-80:]!r}")
    return found.group(1).replace(",", "").rstrip(".")


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (question, answer) as a row of the project's schema."""
    return {
        "data_source": DATASET,
        "prompt": [{"role": "user", "content": f"{raw['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": final_answer(raw["answer"])},
        "extra_info": {"split": split, "index": index, "question": raw["question"], "answer": raw["answer"]},
    }


if __name__ == "__main__":
    write_splits(convert, arguments(__doc__.splitlines()[0], "~/data/gsm8k"), DATASET, CONFIG)
