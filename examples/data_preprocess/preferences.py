"""Preferences of people and of judges as parquet, in folders sft, rm and rl.

python examples/data_preprocess/preferences.py --dataset hh_rlhf --local_save_dir ~/data/hh_rlhf
python examples/data_preprocess/preferences.py --dataset ultrafeedback --local_save_dir ~/data/ultrafeedback

sft has `messages` that end in the preferred answer, rm pairs (`chosen`, `rejected`, and `margin` where the
data scores its answers), rl `prompt`s alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rows import argument_parser, write_splits

from hybridflow.config.preference import PreferenceDataConfig
from hybridflow.data.row_schema import answers_of_pair

DATASETS: dict[str, tuple[str, Mapping[str, tuple[str, str]]]] = {
    "hh_rlhf": ("Anthropic/hh-rlhf", {}),
    "ultrafeedback": (
        "HuggingFaceH4/ultrafeedback_binarized",
        {split: ("HuggingFaceH4/ultrafeedback_binarized", f"{split}_prefs") for split in ("train", "test")},
    ),
}
PARTS = ("sft", "rm", "rl")


def convert(raw: dict[str, Any], split: str, index: int, *, part: str, source: str) -> dict[str, Any] | None:
    """Return one raw row as a row of `part`; None for a row that is no pair."""
    try:
        chosen, rejected = answers_of_pair(raw, PreferenceDataConfig())
    except (TypeError, ValueError):
        return None
    prompt = chosen[:-1]
    if part == "sft":
        return {"messages": chosen}
    if part == "rl":
        info = {"split": split, "index": index}
        return {"data_source": source, "prompt": prompt, "ability": "chat", "extra_info": info}
    row: dict[str, Any] = {"chosen": chosen, "rejected": rejected}
    if raw.get("score_chosen") is not None:
        row["margin"] = float(raw["score_chosen"]) - float(raw["score_rejected"])
    return row


if __name__ == "__main__":
    parser = argument_parser(__doc__.splitlines()[0], "~/data/preferences")
    parser.add_argument("--dataset", choices=DATASETS, required=True)
    given = parser.parse_args()
    name, hub_splits = DATASETS[given.dataset]
    folder = Path(given.local_save_dir)
    remote = given.hdfs_dir
    for wanted in PARTS:
        given.local_save_dir = str(folder / wanted)
        if remote:
            given.hdfs_dir = f"{remote.rstrip('/')}/{wanted}"
        write_splits(partial(convert, part=wanted, source=name), given, name, hub_splits=hub_splits)
