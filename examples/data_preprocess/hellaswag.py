"""HellaSwag as parquet: choose how a text goes on. Its reward is examples/rewards/choice.py.

python examples/data_preprocess/hellaswag.py --local_save_dir ~/data/hellaswag
python examples/data_preprocess/hellaswag.py --local_dataset_path ~/raw/hellaswag
"""

from __future__ import annotations

import re
from typing import Any

from rows import arguments, write_splits

DATASET = "Rowan/hellaswag"
LETTERS = "ABCD"
INSTRUCTION = "How does the text go on? End with the letter inside <answer> and </answer>."
_MARKUP = re.compile(r"\[[^\[\]]*\]")


def clean(text: str) -> str:
    """Return a text of WikiHow without what is left of its markup."""
    return re.sub(r"\s+", " ", _MARKUP.sub("", text.replace(" [title]", ". "))).strip()


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (activity_label, ctx_a, ctx_b, endings, label) as a row of the project's schema."""
    text = clean(f"{raw['activity_label']}: {raw['ctx_a']} {raw['ctx_b'].capitalize()}")
    endings = [f"{letter}. {clean(ending)}" for letter, ending in zip(LETTERS, raw["endings"], strict=True)]
    return {
        "data_source": DATASET,
        "prompt": [{"role": "user", "content": "\n".join([text, "", *endings, "", INSTRUCTION])}],
        "ability": "commonsense",
        "reward_model": {"style": "rule", "ground_truth": LETTERS[int(raw["label"])]},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0], "~/data/hellaswag")
    # the labels of the hub's test split are secret
    write_splits(convert, options, DATASET, hub_splits={"test": (DATASET, "validation")})
