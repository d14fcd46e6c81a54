"""Ways to get a run wrong: each makes the wrong thing in a folder and returns overrides that use it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from safetensors.torch import load_file, save_file
from tiny_run import Inputs, gsm8k_rows, small_run, write_jsonl, write_parquet

from hybridflow.models.tiny import create_tiny_model
from hybridflow.trainer.main_ppo import main as main_ppo

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
Make = Callable[[Inputs, Path], list[str]]
Case = tuple[str, Make, tuple[str, ...]]
"""(name, what goes wrong, what the message must hold)"""
ONE_MESSAGE = re.compile(
    r"^(?:Config|Data|Model|Reward|Rollout|Training|Checkpoint|Worker)Error: ", re.MULTILINE
)


def keys(*overrides: str) -> Make:
    """A case that needs no files; {tmp} is the test's folder."""
    return lambda inputs, tmp: [override.replace("{tmp}", str(tmp)) for override in overrides]


def model_with(change: Callable[[Path], None]) -> Make:
    """A copy of the model folder with something wrong in it."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        folder = tmp / "model"
        shutil.copytree(inputs.model, folder)
        change(folder)
        return [f"actor_rollout_ref.model.path={folder}"]

    return make


def data_with(name: str, write: Callable[[Path], Any], *more: str) -> Make:
    """A data file with something wrong in it."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        write(tmp / name)
        return [f"data.train_files={tmp / name}", *more]

    return make


def reward_with(code: str, *more: str) -> Make:
    """A reward function of the user's; `code` is its body."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        path = tmp / "my_reward.py"
        path.write_text(
            "import time\n\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    "
            f"{code}\n"
        )
        return [f"reward.custom_reward_function.path={path}", *more]

    return make


def edit_json(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change entries of a JSON file in a model folder; None removes one."""

    def change(folder: Path) -> None:
        path = folder / name
        content = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))

    return change


def rows_without(*columns: str) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if name not in columns}
        for row in gsm8k_rows(6, split="train")
    ]


def rows_with(**columns: Any) -> list[dict[str, Any]]:
    return [row | columns for row in gsm8k_rows(6, split="train")]


def jsonl(rows: list[dict[str, Any]]) -> Callable[[Path], Any]:
    return lambda path: write_jsonl(path, rows)


def parquet(rows: list[dict[str, Any]]) -> Callable[[Path], Any]:
    return lambda path: write_parquet(path, rows)


def text(content: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(content)


def empty_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(gsm8k_rows(1, split="train")).slice(0, 0), path)


def bad_estimator(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "mine.py").write_text(
        "def mine(token_level_rewards, response_mask, group_ids):\n    raise ValueError('no such luck')\n"
    )
    return [f"algorithm.adv_estimator={tmp / 'mine.py'}:mine"]


def not_finite(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def estimator_of_nan(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "mine.py").write_text(
        "def mine(token_level_rewards, response_mask):\n    return (token_level_rewards * float('nan'),) * "
        "2\n"
    )
    return [f"algorithm.adv_estimator={tmp / 'mine.py'}:mine"]


def loss_that_raises(inputs: Inputs, tmp: Path) -> list[str]:
    (tmp / "mine.py").write_text("def mine(*args, **kwargs):\n    return args[0].nothing\n")
    return [f"{ACTOR}.policy_loss.loss_mode={tmp / 'mine.py'}:mine"]


def other_seed(inputs: Inputs, tmp: Path) -> list[str]:
    """Resume, with another seed, a run that has a checkpoint."""
    assert main_ppo(small_run(inputs, tmp / "run", "trainer.save_freq=1", steps=1)) == 0
    return ["trainer.seed=7"]


def other_size(inputs: Inputs, tmp: Path) -> list[str]:
    """Resume, with another model, a run that has a checkpoint."""
    assert main_ppo(small_run(inputs, tmp / "run", "trainer.save_freq=1", steps=1)) == 0
    return [f"actor_rollout_ref.model.path={_other_model(tmp)}"]


def other_vocabulary(*more: str) -> Make:
    """A model that does not know all of the tokens; {other} in the overrides is its folder."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        folder = shutil.copytree(inputs.model, tmp / "other")
        weights = load_file(folder / "model.safetensors")
        rows = weights["model.embed_tokens.weight"].shape[0] - 8
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in weights:
                weights[name] = weights[name][:rows].clone()
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        edit_json("config.json", vocab_size=rows)(folder)
        return [override.replace("{other}", str(folder)) for override in more]

    return make


def _other_model(tmp: Path) -> Path:
    return create_tiny_model(tmp / "other", hidden=16, layers=2, heads=2, kv_heads=1, intermediate=64)


TWO_ROWS = ("data.train_max_samples=2", "data.shuffle=false", "data.train_batch_size=2", f"{ROLLOUT}.n=1")
HANGING = ("reward.num_workers=1", "reward.timeout=2.5")
LONG = [{"role": "user", "content": "1 + 1 = ? " * 20}]


PLUGINS = """
class Sampler:
    def __init__(self, dataset, seed):
        self.size = len(dataset)

    def __len__(self):
        return self.size

    def __iter__(self):
        return iter([999] * self.size)

    def set_epoch(self, epoch):
        pass


class Data:
    def __init__(self, files, tokenizer, config):
        raise ValueError("no such luck")


class Items:
    def __init__(self, files, tokenizer, config):
        pass

    def __len__(self):
        return 8

    def __getitem__(self, index):
        raise KeyError("luck")


def one(token_level_rewards):
    return token_level_rewards
"""


def plugin(key: str, name: str) -> Make:
    """One of PLUGINS."""

    def make(inputs: Inputs, tmp: Path) -> list[str]:
        (tmp / "mine.py").write_text(PLUGINS)
        return [f"{key}={tmp / 'mine.py'}:{name}"]

    return make
