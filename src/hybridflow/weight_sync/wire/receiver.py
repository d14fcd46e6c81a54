"""The engine's side of a push, in the process that holds the engine's weights: loads them, compares their
checksums and keeps their version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from hybridflow.distributed.shards import bit_sums
from hybridflow.errors import RolloutError
from hybridflow.weight_sync.wire.channel import Channel
from hybridflow.weight_sync.wire.transports import Entry, GroupReader, Reader, open_reader, unpack

NOTHING = -1
"""Version of weights that were never pushed, or only in part."""

Part = Literal["whole", "base", "adapters"]
"""What a push contains: all weights, the base weights without LoRA adapters, or the adapters alone."""

Weights = Iterable[tuple[str, Tensor]]
"""Weights by the names of the model's files."""

Summed = Iterable[Sequence[tuple[str, Tensor, int]]]
"""Buckets of weights of one device, each with the checksum that its sender computed."""

Load = Callable[[Iterator[tuple[str, Tensor]]], object]
"""Function that loads weights into the engine's model, and reads its argument to the end."""


class Receiver:
    """Weights that an engine's worker has received: their version and their checksums."""

    def __init__(self) -> None:
        self.version = NOTHING
        self.checksums: dict[str, int] = {}
        """Checksum of each tensor of the newest push, as it arrived."""
        self.has_base = False
        """Whether adapters may be pushed: the base weights that they change were pushed before."""
        self._complete = False
        self._names: dict[Part, frozenset[str]] = {}
        self._group: GroupReader | None = None
        """The process group of the newest push, kept for the next one."""

    def forget(self) -> None:
        """Forget the weights: the engine may not generate until they are pushed again."""
        self.version = NOTHING
        self.has_base = False

    def receive(self, load: Load, receipt: dict[str, Any]) -> dict[str, Any]:
        """Fetch a push from the sender that `receipt` names.

        Returns {"version": …}, or {"error": …} where it failed; then the version is `NOTHING`.
        """
        try:
            channel = Channel.connect(receipt["host"], receipt["port"], receipt["token"], receipt["timeout"])
            try:
                self.take(load, self._arriving(channel), receipt["version"], receipt.get("part", "whole"))
            finally:
                channel.close()
        except Exception as error:  # whatever it is, the sender shall read it
            return {"error": f"{type(error).__name__}: {error}"}
        return {"version": self.version}

    def take(self, load: Load, weights: Summed, version: int, part: Part = "whole") -> None:
        """Load weights; RolloutError for one whose checksum differs here. A base alone has no version:
        nothing is generated before its adapters have come.
        """
        if part == "adapters" and not self.has_base:
            raise RolloutError("adapters came before the weights that they change")
        self.version = NOTHING
        self.checksums = {}
        self._complete = False
        self.has_base = part == "adapters"
        load(self._compared(weights, part))
        if not self._complete:
            raise RolloutError(f"the engine stopped taking weights after {len(self.checksums)} tensors")
        self._names[part] = frozenset(self.checksums)
        self.has_base = part != "whole"
        if part != "base":
            self.version = version

    def _compared(self, weights: Summed, part: Part) -> Iterator[tuple[str, Tensor]]:
        for bucket in weights:
            sums = bit_sums([tensor for _, tensor, _ in bucket]).tolist()  # one wait for the device
            for (name, tensor, sent), here in zip(bucket, sums, strict=True):
                if here != sent:
                    raise RolloutError(
                        f"{name} did not arrive as it was sent: its checksum was {sent % 2**64:016x} and is "
                        f"{here % 2**64:016x}"
                    )
                self.checksums[name] = here
                yield name, tensor
        lacking = sorted(self._names.get(part, frozenset()) - frozenset(self.checksums))
        if lacking:
            raise RolloutError(
                f"{len(lacking)} tensors that an earlier push had are not in this one, such as {lacking[0]}"
            )
        self._complete = True

    def _arriving(self, channel: Channel) -> Iterator[list[tuple[str, Tensor, int]]]:
        group = self._group
        self._group = None
        reader: Reader | None = group
        count = 0
        try:
            channel.send({"group": group and group.token})
            while True:
                frame = channel.receive()
                if "open" in frame:
                    if reader is not None:
                        reader.close()
                    reader = open_reader(frame["open"])
                elif "bucket" in frame:
                    assert reader is not None, "a bucket comes after its transport"
                    entries = [Entry(*entry) for entry in frame["bucket"]]
                    tensors = unpack(reader.fetch(frame["size"]), entries)
                    yield [
                        (entry.name, tensor, entry.checksum)
                        for entry, tensor in zip(entries, tensors, strict=True)
                    ]
                    count += len(entries)
                    channel.send({"ack": count})
                else:
                    if frame["end"] != count:
                        raise RolloutError(f"{count} of {frame['end']} tensors arrived")
                    if isinstance(reader, GroupReader):
                        reader.rest()
                        self._group = reader
                        reader = None
                    channel.send({"ack": count})
                    return
        finally:
            if reader is not None:
                reader.close()
