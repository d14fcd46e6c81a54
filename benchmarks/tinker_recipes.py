"""Two loops of tinker_cookbook, unchanged, against `hybridflow tinker`: supervised (`recipes/sl_loop.py`),
and by reinforcement with importance sampling (`recipes/rl_loop.py`).

    hybridflow tinker FOLDER --name meta-llama/Llama-3.2-1B       # the key is in HYBRIDFLOW_TINKER_KEY
    TINKER_API_KEY=tml-… python benchmarks/tinker_recipes.py FOLDER http://127.0.0.1:8010

What the loops would fetch from the hub is given to them here: the tokenizer of FOLDER, under a name by which
the cookbook chooses the renderer `role_colon`, which any tokenizer can write, and rows that are made on the
spot. A small model solves no GSM8K, so the reward is the share of even digits in a response. Their `main`
functions run as they are, and the curves they log are printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import datasets

NAME = "meta-llama/Llama-3.2-1B"
"""A base model that the cookbook knows."""


def conversations(count: int) -> datasets.Dataset:
    """Rows of the form of no_robots: a sum that is asked, and the answer."""
    draw = random.Random(0)
    rows = []
    for _ in range(count):
        first, second = draw.randrange(10), draw.randrange(10)
        question = {"role": "user", "content": f"What is {first} plus {second}?"}
        rows.append(
            [question, {"role": "assistant", "content": f"{first} plus {second} is {first + second}."}]
        )
    return datasets.Dataset.from_dict({"messages": rows})


def problems(count: int) -> datasets.Dataset:
    """Rows of the form of GSM8K, whose answer is that of the example in the loop's prompt."""
    words = ("banana", "berry", "strawberry", "merry", "carry")
    questions = [f"How many letters are asked for in {words[place % len(words)]}?" for place in range(count)]
    return datasets.Dataset.from_dict({"question": questions, "answer": ["So it is.\n#### 3"] * count})


def evens(response: str, answer: str) -> float:
    """Return the share of even digits among the characters of a response."""
    return sum(letter in "02468" for letter in response) / max(1, len(response))


def local(name: str, *words: str) -> datasets.DatasetDict:
    """Stand in for `datasets.load_dataset`."""
    made = conversations(160) if "no_robots" in name else problems(160)
    return datasets.DatasetDict({"train": made})


def curve(folder: Path, key: str) -> list[float]:
    """Return a metric of each step from the log of a loop."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [round(line[key], 4) for line in lines if key in line]


def main() -> None:
    """Run both loops and print their curves."""
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("folder", help="the folder that the server serves")
    words.add_argument("url")
    words.add_argument("--steps", type=int, default=20)
    options = words.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    from tinker_cookbook.recipes import rl_loop, sl_loop
    from tinker_cookbook.tokenizer_utils import register_tokenizer
    from transformers import AutoTokenizer

    register_tokenizer(NAME, lambda: AutoTokenizer.from_pretrained(options.folder))
    datasets.load_dataset = local
    rl_loop.get_reward = evens
    common: dict[str, Any] = {
        "base_url": options.url,
        "model_name": NAME,
        "max_steps": options.steps,
        "save_every": 4,
        "lora_rank": 8,
    }
    with tempfile.TemporaryDirectory() as folder:
        supervised = Path(folder) / "sl"
        sl_loop.main(
            sl_loop.Config(
                log_path=str(supervised), batch_size=8, learning_rate=1e-3, max_length=128, **common
            )
        )
        print("supervised: nats per token", curve(supervised, "train_mean_nll"), flush=True)
        reinforced = Path(folder) / "rl"
        rl_loop.main(
            rl_loop.Config(
                log_path=str(reinforced),
                batch_size=4,
                group_size=8,
                max_tokens=24,
                learning_rate=2e-3,
                loss_fn="importance_sampling",
                **common,
            )
        )
        print("reinforcement: mean reward", curve(reinforced, "reward/total"))


if __name__ == "__main__":
    main()
