"""Conversations of CollabLLM as parquet, each with the problem that a simulated user has in mind.

python examples/data_preprocess/collabllm.py --dataset math-hard --local_save_dir ~/data/collabllm
python examples/data_preprocess/collabllm.py --dataset medium --task_desc "writing an article"
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from rows import argument_parser, write_splits

SYSTEM = (
    "You are a helpful assistant who works with the user. Find out what the user wants: where a message is "
    "unclear or lacks something, ask a specific question and assume nothing. Offer next steps and choices "
    "that are easy to answer. Be brief, right and friendly, and say so where you do not know something."
)


def convert(
    raw: dict[str, Any], split: str, index: int, *, task_desc: str, seen: set[str]
) -> dict[str, Any] | None:
    """Return one raw row (prompt, single_turn_prompt, single_turn_completion or completion); None for a
    prompt that was there before.
    """
    prompt = [{"role": "system", "content": SYSTEM}, *raw["prompt"]]
    key = json.dumps(prompt)
    if key in seen:
        return None
    seen.add(key)
    truth = raw.get("single_turn_completion") or raw["completion"]
    user = {"name": "collabllm", "single_turn_prompt": raw["single_turn_prompt"], "task_desc": task_desc}
    return {
        "data_source": "collabllm",
        "prompt": prompt,
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": split, "index": index, "interaction_kwargs": user},
    }


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0], "~/data/collabllm")
    parser.add_argument(
        "--dataset",
        default="math-hard",
        help="math-hard, medium, bigcodebench; with -large: more rows",
    )
    parser.add_argument("--task_desc", default="solving math problems", help="what the user wants help with")
    options = parser.parse_args()
    dataset = f"collabllm/collabllm-multiturn-{options.dataset}"
    write_splits(
        partial(convert, task_desc=options.task_desc, seen=set()),
        options,
        dataset,
        hub_splits={"train": (dataset, "train[:90%]"), "test": (dataset, "train[90%:]")},
    )
