"""MATH as parquet: competition problems whose solutions end in a boxed answer.

python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
python examples/data_preprocess/math_dataset.py --local_dataset_path ~/raw/math --local_save_dir ~/data/math
"""

from __future__ import annotations

from typing import Any

from rows import arguments, write_splits

from hybridflow.data.answers.stated import last_boxed

DATASET = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def boxed_answer(solution: str) -> str:
    """Return the content of the last box, as the reward finds it. ValueError where there is none."""
    answer = last_boxed(solution)
    if answer is None:
        raise ValueError(f"no \\boxed answer in the solution {solution[-80:]!r}, or one that is not closed")
    return answer


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one raw row (problem, solution, perhaps level and type) as a row of the project's schema."""
    return {
        "data_source": DATASET,
        "prompt": [{"role": "user", "content": f"{raw['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": boxed_answer(raw["solution"])},
        "extra_info": {"split": split, "index": index, "level": raw.get("level"), "type": raw.get("type")},
    }


if __name__ == "__main__":
    write_splits(convert, arguments(__doc__.splitlines()[0], "~/data/math"), DATASET)
