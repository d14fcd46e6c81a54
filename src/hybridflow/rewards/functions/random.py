"""Random: the control, a score that does not depend on the answer.

A run whose accuracy rises with it improves for another reason than the reward.
"""

from __future__ import annotations

import hashlib
from typing import Any


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    probability: float = 0.5,
) -> float:
    """Score 1.0 with `probability`, else 0.0.

    A hash of (seed, the prompt's index in `extra_info`, the response) decides. The same response to the same
    prompt always scores the same, whatever the order or the number of workers.
    """
    index = (extra_info or {}).get("index", "")
    digest = hashlib.blake2b(
        f"{seed}\x00{index}\x00{solution_str}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return float(int.from_bytes(digest, "big") / 2**64 < probability)
