"""Write the questions of the sums task: `python sums.py FOLDER` makes train.jsonl and test.jsonl.

Each of the 361 pairs of numbers from 2 to 20 is in one of the files: 280 are trained on, and 81 are held out.
"""

import json
import random
import sys
from pathlib import Path

NUMBERS = range(2, 21)
HELD_OUT = 81


def row(first: int, second: int) -> dict[str, object]:
    """Return the row of one question: its prompt, and the answer that the reward compares with."""
    question = f"What is {first} + {second}? Answer with a number."
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "reward_model": {"ground_truth": str(first + second)},
    }


def main(folder: Path) -> None:
    """Deal the pairs to the two files, always in the same way."""
    pairs = [(first, second) for first in NUMBERS for second in NUMBERS]
    random.Random(0).shuffle(pairs)
    files = {"test.jsonl": pairs[:HELD_OUT], "train.jsonl": pairs[HELD_OUT:]}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in files.items():
        lines = [json.dumps(row(*pair)) + "\n" for pair in part]
        (folder / name).write_text("".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
