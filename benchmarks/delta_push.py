"""Pushes of what an update has changed beside pushes of whole weights, by each road that a run has: bytes,
and CPU seconds of both ends.

    python benchmarks/delta_push.py MODEL [--updates 4]        (five minutes; MODEL: a Hugging Face folder)

    this process       the replica takes the share from the process that trains
    another process    the share goes through Ray's object store to a process of its own, as in a run
    files              the weights are written as a Hugging Face folder, whole, and another process reads it

Float32 weights are trained by AdamW and generated with in bfloat16, as on a GPU. Gradients are random
numbers: an AdamW step is about as long as the learning rate whatever they are. Each push is checked by the
checksums of all weights where they have arrived. Writes `benchmarks/results/delta_push.json` and `.md`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import side_by_side as kit
import torch

from hybridflow.distributed.shards import Box
from hybridflow.engines import Held
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import save_hf
from hybridflow.rollout.native.engine import NativeEngine
from hybridflow.weight_sync.holding import Holding
from hybridflow.weight_sync.push import RemotePush, WeightExport, WeightShare

TITLE = "Pushes of what has changed"
RATES = (1e-6, 1e-5, 1e-4)
ROADS = ("this process", "another process", "files")
HEAD = ("learning rate", "push", "MB", "of the weights", "road", "sending, CPU s", "taking, CPU s")


class Replica:
    """An engine with weights of its own, here or in another process."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.policy = build_policy(folder, device=torch.device("cpu"), dtype="bfloat16", probe=False)
        self.push = RemotePush(self.policy, Holding.whole(self.policy))
        self.engine = NativeEngine(self.policy, eos_token_ids=())

    def update(self, share: WeightShare, began: float = 0.0) -> float:
        """Take a share, which is compared with its checksums; gives the CPU seconds it took.

        `began`: the CPU time of this process before the share came to it; 0: it is here already.
        """
        began = began or time.process_time()
        self.push.update(self.engine, [share], share.version)
        return time.process_time() - began

    def read(self, folder: Path, checksums: dict[str, int]) -> float:
        """Take the weights of a Hugging Face folder; gives the CPU seconds it took."""
        began = time.process_time()
        policy = build_policy(folder, device=torch.device("cpu"), dtype="bfloat16", probe=False)
        holding = Holding.whole(policy)
        found = holding.checksums(dict(policy.named_parameters()))
        assert dict(zip(holding.boxes, found.tolist(), strict=True)) == checksums, "other weights arrived"
        return time.process_time() - began


@ray.remote(num_cpus=0)
class ReplicaProcess(Replica):
    """A replica in a process of its own, which fetches what is sent to it."""

    def fetch(self, share: list[Any]) -> float:
        """Take the share behind a reference from the object store; gives the CPU seconds it took."""
        began = time.process_time()
        return self.update(ray.get(share[0]), began)


def measure(folder: Path, rate: float, updates: int, deltas: bool, road: str) -> dict[str, Any]:
    """Bytes and seconds of pushes after so many updates each."""
    device = torch.device("cpu")
    trained = build_policy(folder, device=device, dtype="float32", probe=False)
    weights = dict(trained.named_parameters())
    optimizer = torch.optim.AdamW(weights.values(), lr=rate, weight_decay=0.0)

    def held() -> Iterator[Held]:
        for name, weight in weights.items():
            shape = tuple(weight.shape)
            yield Held(name, shape, Box.whole(shape), weight.detach(), torch.bfloat16, True)

    export = WeightExport(held, device, deltas=deltas)
    replica: Any = Replica(folder) if road == "this process" else ReplicaProcess.remote(folder)

    def pushed(version: int) -> dict[str, float]:
        """One push: bytes, and CPU seconds of either end."""
        began = time.process_time()
        share = export.share(version)
        if road == "this process":
            sent = time.process_time() - began
            return {"bytes": share.nbytes, "sending": sent, "taking": replica.update(share)}
        if road == "another process":
            reference = ray.put(share)
            sent = time.process_time() - began
            taken = ray.get(replica.fetch.remote([reference]), timeout=600)
            return {"bytes": share.nbytes, "sending": sent, "taking": taken}
        with tempfile.TemporaryDirectory() as place:
            began = time.process_time()
            save_hf(trained, Path(place), dtype=torch.bfloat16)
            sent = time.process_time() - began
            size = sum(file.stat().st_size for file in Path(place).glob("*.safetensors"))
            taken = ray.get(replica.read.remote(Path(place), share.checksums), timeout=600)
        return {"bytes": size, "sending": sent, "taking": taken}

    pushed(1)
    draw = torch.Generator().manual_seed(0)
    found = []
    for version in range(2, updates + 2):
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=draw)
        optimizer.step()
        found.append(pushed(version))
    return {
        "rate": rate,
        "deltas": deltas,
        "road": road,
        "whole": sum(2 * weight.numel() for weight in weights.values()),
        **{name: [push[name] for push in found] for name in found[0]},
    }


def page(result: dict[str, Any]) -> str:
    """The page of a result."""
    rows = []
    for case in result["cases"]:
        size, sending, taking = (statistics.median(case[name]) for name in ("bytes", "sending", "taking"))
        kind = "what has changed" if case["deltas"] else "whole"
        part = f"{100 * size / case['whole']:.1f} %"
        ends = (f"{sending:.2f}", f"{taking:.2f}")
        rows.append((f"{case['rate']:g}", kind, f"{size / 1e6:.1f}", part, case["road"], *ends))
    pushes = len(result["cases"][0]["bytes"])
    return f"""Float32 weights are trained by AdamW and generated with in bfloat16, as on a GPU; gradients are
random numbers. Medians of {pushes} pushes. "Sending" makes what is sent, "taking" puts it into the replica
and computes its checksums; every push has arrived to the bit. Another process takes a share from Ray's
object store; files are a Hugging Face folder, which is always whole.

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
    with tempfile.TemporaryDirectory() as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        cases = [
            measure(options.model, rate, options.updates, deltas, road)
            for rate in RATES
            for road in ROADS
            for deltas in (False, True)
            if not (deltas and road == "files") and not (rate != RATES[0] and road == "files")
        ]
        ray.shutdown()
    result = kit.facts(["torch", "transformers"], threads=1) | {"cases": cases}
    kit.write("delta_push", result, TITLE, page(result))


if __name__ == "__main__":
    main()
