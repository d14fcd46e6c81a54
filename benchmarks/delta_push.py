"""Pushes of what an update has changed beside pushes of whole weights: bytes and CPU seconds.

    python benchmarks/delta_push.py MODEL [--updates 4]        (two minutes; MODEL: a Hugging Face folder)

Float32 weights are trained by AdamW and generated with in bfloat16, as on a GPU. Gradients are random
numbers: an AdamW step is about as long as the learning rate whatever they are. Each push is checked by the
replica's checksums. Writes `benchmarks/results/delta_push.json` and `.md`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import side_by_side as kit
import torch

from hybridflow.distributed.shards import Box
from hybridflow.engines import Held
from hybridflow.models.files.build import build_policy
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.weight_sync.holding import Holding
from hybridflow.weight_sync.push import RemotePush, WeightExport

TITLE = "Pushes of what has changed"
RATES = (1e-6, 1e-5, 1e-4)
HEAD = ("learning rate", "push", "MB", "of the weights", "export, CPU s", "load, CPU s")


def measure(folder: Path, rate: float, updates: int, deltas: bool) -> dict[str, Any]:
    """Bytes and seconds of pushes after so many updates each."""
    device = torch.device("cpu")
    trained = build_policy(folder, device=device, dtype="float32", probe=False)
    policy = build_policy(folder, device=device, dtype="bfloat16", probe=False)
    weights = dict(trained.named_parameters())
    optimizer = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)

    def held() -> Iterator[Held]:
        for name, weight in weights.items():
            shape = tuple(weight.shape)
            yield Held(name, shape, Box.whole(shape), weight.detach(), torch.bfloat16, True)

    export = WeightExport(held, device, deltas=deltas)
    push = RemotePush(policy, Holding.whole(policy))
    engine = NativeEngine(policy, eos_token_ids=())
    push.update(engine, [export.share(1)], 1)
    draw = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {"bytes": [], "export": [], "load": []}
    for version in range(2, updates + 2):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()
        began = time.process_time()
        share = export.share(version)
        packed = time.process_time()
        push.update(engine, [share], version)
        found["load"].append(time.process_time() - packed)
        found["export"].append(packed - began)
        found["bytes"].append(share.nbytes)
    return {
        "rate": rate,
        "deltas": deltas,
        "whole": sum(2 * weight.numel() for weight in weights.values()),
        **found,
    }


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    rows = []
    for case in result["cases"]:
        size, export, load = (statistics.median(case[name]) for name in ("bytes", "export", "load"))
        kind = "what has changed" if case["deltas"] else "whole"
        part = f"{100 * size / case['whole']:.1f} %"
        rows.append((f"{case['rate']:g}", kind, f"{size / 1e6:.1f}", part, f"{export:.2f}", f"{load:.2f}"))
    pushes = len(result["cases"][0]["bytes"])
    return f"""Float32 weights are trained by AdamW and generated with in bfloat16, as on a GPU; gradients are
random numbers. Medians of {pushes} pushes. "export" makes what is sent, "load" puts it into the replica and
computes its checksums; every push has arrived to the bit.

{kit.table(HEAD, rows)}
"""


def main() -> None:
    """Measure all cases, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--updates", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [
        measure(options.model, rate, options.updates, deltas) for rate in RATES for deltas in (False, True)
    ]
    result = kit.facts(["torch", "transformers"], threads=1) | {"cases": cases}
    kit.write("delta_push", result, TITLE, page(result))


if __name__ == "__main__":
    main()
