"""DAPO-Math-17k and, to validate, AIME 2024 as parquet, with boxed answers, as ReTool wants them.

python examples/data_preprocess/dapo_math.py --local_save_dir ~/data/retool
python examples/data_preprocess/dapo_math.py --local_dataset_path ~/raw/dapo --local_save_dir ~/data/retool

A local folder has train files with DAPO's columns (prompt, reward_model) and test files with AIME's (Problem,
Answer, or in small letters).
"""

from __future__ import annotations

from typing import Any

from rows import arguments, write_splits

DATASET = "BytedTsinghua-SIA/DAPO-Math-17k"
TEST_DATASET = "Maxwell-Jia/AIME_2024"
INSTRUCTION = "Put the final answer into \\boxed{}."
OTHER_INSTRUCTIONS = ("Solve the following math problem step by step.", "Remember to put your answer on")
"""How the paragraphs begin in which DAPO's prompts ask for another form of the answer."""
_seen: set[str] = set()


def question_of(prompt: str) -> str:
    """Return the problem without the paragraphs about the form of the answer."""
    paragraphs = prompt.split("\n\n")
    return "\n\n".join(each for each in paragraphs if not each.startswith(OTHER_INSTRUCTIONS))


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    """Return one raw row of either form; None for a problem that was there before (DAPO repeats each)."""
    if split == "train":
        question = question_of(raw["prompt"][-1]["content"])
        truth = raw["reward_model"]["ground_truth"]
    else:
        low = {name.lower(): value for name, value in raw.items()}
        question, truth = low["problem"], low["answer"]
    if (seen := split + question) in _seen:
        return None
    _seen.add(seen)
    return {
        "data_source": "math_dapo",
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": f"{question}\n\n{INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0], "~/data/retool")
    write_splits(convert, options, DATASET, hub_splits={"test": (TEST_DATASET, "train")})
