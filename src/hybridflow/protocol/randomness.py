"""Keys for every random draw: (seed, purpose, indices) in, one seed or generator out.

There is no global random stream. A draw is keyed by what it is for, so it does not depend on the order of
calls, on the number of ranks or on a resume.
"""

from __future__ import annotations

from hashlib import blake2b

import torch


def derive_seed(seed: int, purpose: str, *indices: int) -> int:
    """A 63-bit seed for `purpose` at `indices` (step, row, ...), the same on every machine and in every
    process.

    Example: `derive_seed(config.seed, "rollout", step, row_id)`.
    """
    key = repr((int(seed), str(purpose), tuple(int(index) for index in indices)))
    return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, purpose: str, *indices: int) -> torch.Generator:
    """A CPU generator that starts from `derive_seed(seed, purpose, *indices)`."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *indices))
