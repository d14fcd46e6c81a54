"""Shared code of the GPU benchmarks: models with random weights, the device's own ceilings, timing, and where
results go.

`--tiny --device cpu` runs a benchmark end to end in seconds, to see that it works; its figures mean nothing
and are not written, unless `--into FOLDER` asks for them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import side_by_side as kit
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, Qwen2Config

from hybridflow.models.files.probe import layer_facts
from hybridflow.models.files.size import matmul_parameters
from hybridflow.models.policy import PolicyModel, use_attention

GIB = 2**30
NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
SIZES = {
    "tiny": (64, 128, 2, 4, 2, 512),
    "0.5B": (896, 4864, 24, 14, 2, 151_936),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936),
    "3B": (2048, 11_008, 36, 16, 2, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 152_064),
}
TIED = {"tiny", "0.5B", "1.5B", "3B"}
PEAKS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "A10G": 70e12,
    "A10": 125e12,
    "4090": 165e12,
    "MI300X": 1307e12,
}
"""Dense bfloat16 peaks in FLOP/s, from the vendors' data sheets (SXM parts where there are several)."""


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bfloat16 peak in FLOP/s; None on CPU and for an unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def parser_of(document: str | None, *, rounds: int, sizes: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what every GPU benchmark has."""
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="a dry run with a tiny model and few tokens; nothing is written"
    )
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument(
        "--into", type=Path, help="folder of the result in place of benchmarks/results, of a dry run too"
    )
    parser.add_argument(
        "--sizes", type=lambda text: text.split(","), default=list(sizes), help=f"of {', '.join(SIZES)}"
    )
    return parser


def device_of(options: argparse.Namespace) -> torch.device:
    """The device to measure; ends the program where it is not there or would take hours."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            "this benchmark needs a CUDA device, and torch sees none; to see that it runs: --tiny --device "
            "cpu"
        )
    if options.device == "cpu" and not options.tiny:
        raise SystemExit("on a CPU only --tiny runs: the models are too large for it")
    return torch.device(options.device)


def make_hf(size: str, device: torch.device, **changes: Any) -> PreTrainedModel:
    """A model of Qwen 2's architecture and of this size, with random weights, in bfloat16 (on CPU float32),
    without an end token.
    """
    config = Qwen2Config(
        **dict(zip(NAMES, SIZES[size], strict=True)),
        max_position_embeddings=32_768,
        tie_word_embeddings=size in TIED,
        pad_token_id=kit.PAD,
        eos_token_id=None,
        **changes,
    )
    torch.manual_seed(0)
    with torch.device(device):
        hf: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32
        )
    hf.generation_config = GenerationConfig(pad_token_id=kit.PAD, eos_token_id=None)
    return hf.eval()


def wait(device: torch.device) -> None:
    """Until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds from here until the device has done it."""
    wait(device)
    started = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - started


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes, the best of several."""
    source = torch.ones((GIB if device.type == "cuda" else GIB // 64) // 4, device=device)
    target = torch.empty_like(source)
    taken = [seconds_of(lambda: target.copy_(source), device) for _ in range(12)]
    return 2 * source.nbytes / min(taken[2:])


def matrix_rate(device: torch.device) -> float:
    """FLOP a second of a large matrix product in the dtype of the models, the best of several."""
    side, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (512, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    taken = [seconds_of(lambda: left @ right, device) for _ in range(12)]
    return 2 * side**3 / min(taken[2:])


def decode_floor(policy: PolicyModel, rows: int, prompt: int, new: int, bandwidth: float) -> float:
    """Return the least seconds of all decode steps but the first token's.

    Each step reads the weights that it multiplies with, and the keys and values of all rows.
    """
    use_attention(policy.hf)
    weights = matmul_parameters(policy.hf) * policy.dtype.itemsize
    token = sum(shape.bytes_per_token for shape in layer_facts(policy)[0].values())
    return sum(weights + rows * (prompt + step) * token for step in range(1, new)) / bandwidth


def free(device: torch.device) -> None:
    """Give back what nothing refers to."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def told_if_too_large(what: str) -> Any:
    """Report what did not fit into the memory of the device, and go on."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        print(f"{what}: out of memory ({str(error).splitlines()[0][:120]})", flush=True)


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return statistics.median(values)


def facts(device: torch.device) -> dict[str, str]:
    """Command, date, machine, the device among it, and versions."""
    found = kit.facts(["torch", "transformers"])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, a dry run"
    return {**found, "machine": f"{name}; {found['machine']}"}


def write(options: argparse.Namespace, name: str, result: Mapping[str, Any], title: str, text: str) -> None:
    """The result and its page; a dry run without `--into` prints the page only."""
    if options.into:
        kit.write(name, result, title, text, folder=options.into)
    elif options.tiny:
        print(f"\n# {title} (dry run, not written)\n\n{text}", flush=True)
    else:
        kit.write(name, result, title, text)
