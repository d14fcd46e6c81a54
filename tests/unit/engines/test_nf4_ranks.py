"""A base in 4 bits on two ranks has the bits of one rank's, and each rank one copy of them, with which it
trains and generates; a checkpoint goes on on another number of ranks, and is exported as on one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_zoo import tiny_llama
from sharded_runs import Run, build, dealt, spec
from test_checkpoint_layouts import EVERYONE, PARTS, SCHEDULED, assert_read, read, write

from hybridflow.checkpoint.sharded import load_shards
from hybridflow.config.model import FSDPConfig
from hybridflow.distributed.shards import bit_sums
from hybridflow.engines.fsdp import FSDPEngine
from hybridflow.merger import merge
from hybridflow.merger.merge import compare
from hybridflow.models.adapters.lora import LoraSettings, quantized_layers
from hybridflow.models.copies.twin import Twin
from hybridflow.models.files.build import build_policy
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.base import WeightSource
from hybridflow.weight_sync.reshard import GatheredTwin, OffloadedSource
from ranks import Ranks

LORA = LoraSettings(rank=4, alpha=8, seed=3, exclude_modules="o_proj", quantization="nf4")
"""One kind of layers is quantized and gets no adapter."""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    tiny_llama(tied=False, seed=3, bias=True).save_pretrained(tmp_path / "model")
    return Run(str(tmp_path / "model"), lora=LORA, optim=SCHEDULED)


def digests(policy: PolicyModel) -> dict[str, list[int]]:
    layers = quantized_layers(policy).items()
    return {name: bit_sums([layer.codes, layer.scales]).tolist() for name, layer in layers}


def generate(rank: int, run: Run) -> dict[str, list[int]]:
    """Train a step, and compute with the module that generates; return the digests of the base."""
    engine = build(run, 2)
    rows, loss = dealt(run, engine)
    first = digests(engine.policy)
    engine.train_mini_batch(rows, spec(run), loss, run.limits)
    wanted = engine.forward(rows, spec(run), run.limits)["log_probs"]
    dtypes = {held.name: held.compute_dtype for held in engine.held_weights()}
    twin = Twin(engine.policy, dtypes=dtypes, device=torch.device("cpu"), lora=run.lora)
    source: WeightSource = GatheredTwin(engine.held_weights, twin)
    if engine.is_offloaded:
        source = OffloadedSource(engine, source)
    own = quantized_layers(twin.policy)
    theirs = quantized_layers(engine.policy)
    for version in range(2):
        source.acquire(version)
        if not engine.is_offloaded:
            assert all(own[name].codes is theirs[name].codes for name in theirs), "without a copy"
        generating = FSDPEngine(twin.policy, name="twin", optim=None)
        assert generating.forward(rows, spec(run), run.limits)["log_probs"].equal(wanted)
        assert digests(twin.policy) == first
        source.release()
        assert all(each.is_meta for layer in own.values() for each in layer.buffers()), "they are given back"
    return digests(engine.policy)


@pytest.mark.parametrize("offloads", [False, True])
def test_generation_has_the_very_base_of_training(two_ranks: Ranks, run: Run, offloads: bool) -> None:
    spread = replace(run, fsdp=FSDPConfig(param_offload=offloads))
    first, second = two_ranks.run(generate, spread)
    assert first == second == digests(build(run, 1).policy) and len(first) == 14


def test_a_checkpoint_goes_on_on_another_number_of_ranks(two_ranks: Ranks, run: Run, tmp_path: Path) -> None:
    alone = replace(run, deal=EVERYONE)
    folders = {name: str(tmp_path / name) for name in ("one", "two")}
    write(0, alone, 1, folders["one"])
    two_ranks.run(write, run, 2, folders["two"])
    for name, folder in folders.items():
        exported = [str(tmp_path / f"{name} by {reader}") for reader in folders]
        (state, loss, norm) = read(0, alone, 1, folder, exported[0])
        ranks = two_ranks.run(read, run, 2, folder, exported[1])
        saved = load_shards(Path(folder), {part: {} for part in PARTS})
        assert saved["model"] and all("lora_" in each for each in saved["model"])
        assert_read(saved, [state])
        for loaded, _, _ in ranks:
            loaded.pop("generation")
        assert_read(saved, [loaded for loaded, _, _ in ranks])
        assert sum(each for _, each, _ in ranks) == pytest.approx(loss, abs=1e-6)
        assert sum(each for _, _, each in ranks) == pytest.approx(norm, rel=1e-5)
        merged = merge(folder, tmp_path / f"{name} merged", dtype="float32")
        assert "log-probs of a probe batch within" in compare(folder, merged)
        wanted = build_policy(merged, device="cpu", probe=False).state_dict()
        for each in exported:
            found = build_policy(each, device="cpu", probe=False).state_dict()
            assert found.keys() == wanted.keys()
            assert all(torch.allclose(found[key], wanted[key], atol=1e-6) for key in wanted)
