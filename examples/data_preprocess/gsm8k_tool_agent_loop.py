"""GSM8K as parquet, whose rows name the agent that plays them, so that no key has to.

python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_save_dir ~/data/gsm8k_tools
"""

from __future__ import annotations

from typing import Any

import gsm8k
import gsm8k_multiturn_w_tool
from rows import arguments, write_splits


def convert(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return a row with a tool, for the agent `tool_agent`."""
    return {**gsm8k_multiturn_w_tool.convert(raw, split, index), "agent_name": "tool_agent"}


if __name__ == "__main__":
    options = arguments(__doc__.splitlines()[0], "~/data/gsm8k_tools")
    write_splits(convert, options, gsm8k.DATASET, gsm8k.CONFIG)
