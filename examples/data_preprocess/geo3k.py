"""Geometry3k as parquet: questions about a drawing, each with its picture and the value that is asked for.

python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
python examples/data_preprocess/geo3k.py --local_dataset_path ~/raw/geometry3k --local_save_dir ~/data/geo3k
"""

from __future__ import annotations

import io
from typing import Any

from PIL import Image
from rows import arguments, write_splits

DATASET = "hiyouga/geometry3k"
INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in "
    "\\boxed{}."
)


def stored(picture: Any) -> Any:
    """Return a picture as a file of parquet holds it: what the hub has decoded becomes PNG again."""
    if not isinstance(picture, Image.Image):
        return picture
    file = io.BytesIO()
    picture.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (problem with <image>, images, answer) as a row of the project's schema."""
    return {
        "data_source": DATASET,
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "images": [stored(picture) for picture in raw["images"]],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": raw["answer"]},
        "extra_info": {"split": split, "index": index, "question": raw["problem"], "answer": raw["answer"]},
    }


if __name__ == "__main__":
    write_splits(convert, arguments(__doc__.splitlines()[0], "~/data/geo3k"), DATASET)
