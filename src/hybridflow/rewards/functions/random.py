"""The control: a score that knows nothing of the answer. A run that improves on it improves for another
reason.
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
    **kwargs: Any,
) -> float:
    """1.0 with `probability`, else 0.0, decided by a hash of (seed, the prompt's index in `extra_info`, the
    response).

    The same response to the same prompt always scores the same, whatever the order or the number of workers.
    """
    index = (extra_info or {}).get("index", "")
    digest = hashlib.blake2b(
        f"{seed}\x00{index}\x00{solution_str}".encode("utf-8", "surrogatepass"), digest_size=8
    ).digest()
    return float(int.from_bytes(digest, "big") / 2**64 < probability)
