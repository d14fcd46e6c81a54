"""The devices that a plan knows: peak, memory and links of each, by their makers' data sheets.

"16xH100" ──read_devices──► Cluster(hardware, 16) ──► link of a group of neighbours, seconds of a transfer

Peaks are of dense bfloat16 without sparsity. Links are in bytes a second in one direction for each device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hybridflow.distributed.accelerators import GPU
from hybridflow.errors import ConfigError

MOST_DEVICES = 2048
"""Devices of the largest cluster that is planned: the ways to distribute them grow with their square."""
CPU = "CPU"
"""Name of the hardware that is measured where it is."""
GB = 1e9
TB = 1e12


@dataclass(frozen=True)
class Hardware:
    """One kind of device."""

    name: str
    peak: float
    """FLOPs a second."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second from memory."""
    link: float
    """Bytes a second to a device of the same node."""
    network: float
    """Bytes a second to a device of another node."""
    host: float
    """Bytes a second to the memory of the host."""
    node: int = 8
    """Devices of a node, or of a rack whose links reach all of it."""
    link_latency: float = 10e-6
    """Seconds of a small all-reduce within a node."""
    network_latency: float = 30e-6
    """Seconds of a small all-reduce over nodes."""
    overlaps: bool = True
    """Whether memory and arithmetic run beside each other, so that the slower one counts."""

    @property
    def device(self) -> str:
        """torch's device type, as `trainer.device` takes it; all rows but the CPU's are GPUs of NVIDIA."""
        if self.name == CPU:
            return "cpu"
        return GPU


_ROWS = (
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways, PCIe 4, HDR
    Hardware("A100", 312e12, 80 * GB, 2.039 * TB, 300 * GB, 25 * GB, 32 * GB),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOPS with sparsity, 3.35 TB/s, NVLink 900 GB/s both ways, NDR
    Hardware("H100", 989.5e12, 80 * GB, 3.35 * TB, 450 * GB, 50 * GB, 64 * GB),
    # NVIDIA H200 SXM data sheet: as the H100, 141 GB at 4.8 TB/s
    Hardware("H200", 989.5e12, 141 * GB, 4.8 * TB, 450 * GB, 50 * GB, 64 * GB),
    # H20: 148 TFLOPS, 96 GB at 4.0 TB/s, NVLink 900 GB/s both ways (as resellers give NVIDIA's data sheet)
    Hardware("H20", 148e12, 96 * GB, 4.0 * TB, 450 * GB, 50 * GB, 64 * GB),
    # NVIDIA DGX B200 data sheet: 72 PFLOPS FP8 with sparsity for 8, so 2.25 PFLOPS dense bf16; 64 TB/s for 8
    Hardware("B200", 2250e12, 180 * GB, 8.0 * TB, 900 * GB, 50 * GB, 64 * GB),
    # NVIDIA GB200 NVL72 data sheet: 360 PFLOPS bf16 with sparsity and 13.4 TB at 576 TB/s for 72 devices
    Hardware("GB200", 2500e12, 186 * GB, 8.0 * TB, 900 * GB, 50 * GB, 225 * GB, node=72),
    # AMD Instinct MI300X data sheet: 1,307.4 TFLOPS, 192 GB at 5.3 TB/s, Infinity Fabric 896 GB/s both ways
    Hardware("MI300X", 1307.4e12, 192 * GB, 5.3 * TB, 448 * GB, 50 * GB, 64 * GB),
    # NVIDIA L40S data sheet: 362 TFLOPS, 48 GB at 864 GB/s, PCIe 4 to its neighbours too
    Hardware("L40S", 362e12, 48 * GB, 0.864 * TB, 32 * GB, 25 * GB, 32 * GB),
    # GeForce RTX 4090, NVIDIA's paper on Ada: 165 TFLOPS summed in float32, 24 GB at 1,008 GB/s, PCIe 4
    Hardware("RTX4090", 165.2e12, 24 * GB, 1.008 * TB, 32 * GB, 25 * GB, 32 * GB),
)
HARDWARE = {row.name: row for row in _ROWS}


def cpu_hardware(peak: float, bandwidth: float, memory: float) -> Hardware:
    """Return the figures of one process on a CPU, as `distributed/device.py` has measured them."""
    links = {"link": bandwidth, "network": bandwidth, "host": bandwidth}
    return Hardware(CPU, peak, memory, bandwidth, **links, node=1, overlaps=False)


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind, node by node."""

    hardware: Hardware
    devices: int

    def split(self, devices: int) -> list[int]:
        """Return the number of devices on each node where `devices` of them are neighbours."""
        node = self.hardware.node
        whole = [node] * (devices // node)
        rest = devices % node
        return [*whole, rest] if rest else whole

    @property
    def nodes(self) -> list[int]:
        """Devices of each node."""
        return self.split(self.devices)

    def holds(self, pools: Sequence[int]) -> bool:
        """Return whether the nodes have room for pools of these sizes, each on whole nodes and one part of a
        further node.
        """
        node = self.hardware.node
        left = [0, *sorted(self.nodes)]
        whole = sum(size // node for size in pools)
        if whole:
            left = left[:-whole]
        for rest in sorted((size % node for size in pools), reverse=True):
            fitting = [index for index, free in enumerate(left) if free >= rest]
            if not fitting:
                return False
            left[min(fitting, key=left.__getitem__)] -= rest
        return True

    def rate(self, group: int) -> float:
        """Return the bytes a second with which one of `group` neighbours sends to the others."""
        return self.hardware.link if group <= self.hardware.node else self.hardware.network

    def latency(self, group: int) -> float:
        """Return the seconds of a small all-reduce of `group` neighbours; 0 for one."""
        if group == 1:
            return 0.0
        if group <= self.hardware.node:
            return self.hardware.link_latency
        return self.hardware.network_latency


def read_devices(text: str) -> Cluster:
    """Read a number and a kind of device, as in 16xH100. Raises ConfigError."""
    found = re.fullmatch(r"(\d+)\s*[x×*]\s*([A-Za-z0-9]+)", text.strip())
    known = ", ".join(HARDWARE) + ", and 1xCPU, which measures this machine"
    if found is None or not int(found[1]):
        raise ConfigError(f"--devices {text}: wanted a number and a kind, as in 16xH100; known are {known}")
    name = found[2].upper()
    if name not in HARDWARE:
        raise ConfigError(f"--devices {text}: there is no row for {found[2]}; known are {known}")
    if int(found[1]) > MOST_DEVICES:
        raise ConfigError(f"--devices {text}: plans are searched for up to {MOST_DEVICES:,} devices")
    return Cluster(HARDWARE[name], int(found[1]))


def sizes_of_pools(cluster: Cluster) -> list[int]:
    """Return the sizes that a pool may have, in ascending order: parts of a node, and whole nodes; both with
    a last node that has fewer devices than the others, if there is one.
    """
    node = min(cluster.hardware.node, cluster.devices)
    parts = [size for size in range(1, node) if node % size == 0]
    whole = range(node, cluster.devices + 1, node)
    last = cluster.devices % node
    with_last = range(last, cluster.devices + 1, node) if last else ()
    return sorted({*parts, *whole, *with_last})
