"""GSM8K as parquet of conversations, for supervised fine-tuning on the worked solutions.

python examples/data_preprocess/gsm8k_sft.py --local_save_dir ~/data/gsm8k_sft
"""

from __future__ import annotations

from typing import Any

import gsm8k
from rows import arguments, write_splits


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (question, answer) as a conversation of two messages."""
    prompt = gsm8k.convert(raw, split, index)["prompt"]
    return {"messages": [*prompt, {"role": "assistant", "content": raw["answer"]}]}


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0], "~/data/gsm8k_sft")
    write_splits(convert, options, gsm8k.DATASET, gsm8k.CONFIG)
