"""Dropout of adapters: its masks by a slow reference, how often it drops, and that nothing but the row, the
update, the layer and the seed decides what is dropped.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor
from zoo import packed_rows, tiny_rows

from hybridflow.models.adapters.dropout import DropoutLinear, TokenKeys, dropped_inputs, token_keys
from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, add_lora
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import save_adapter
from hybridflow.models.policy import PolicyModel
from hybridflow.models.tiny import create_tiny_model
from hybridflow.protocol import DataProto
from hybridflow.protocol.packing import make_rows, pack, share_prompts

WORD = 2**64
SETTINGS = LoraSettings(rank=3, alpha=6, seed=5, dropout=0.3)


def mixed(state: int) -> int:
    """The end of SplitMix64, in Python's whole numbers."""
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % WORD
    return state ^ (state >> 31)


def slow_masks(
    row: list[int], inputs: int, update_seed: int, layer_seed: int, rate: float
) -> list[list[bool]]:
    """Whether each input of each token of a row is dropped, from the definition."""
    masks = []
    so_far = 0
    for position, token in enumerate(row):
        so_far = (so_far + mixed(token + (position << 32))) % WORD
        key = mixed((so_far + update_seed) % WORD)
        columns = [mixed((j * 0x9E3779B97F4A7C15 + layer_seed) % WORD) for j in range(inputs)]
        masks.append([(mixed((key + column) % WORD) >> 11) < int(rate * 2**53) for column in columns])
    return masks


def rows(prompts: list[list[int]], responses: list[list[int]]) -> DataProto:
    return DataProto.from_dict(make_rows(prompts, responses, 0))


def test_masks_are_those_of_the_definition() -> None:
    packed = pack(rows([[7, 2], [5]], [[9, 4, 4], [130_000]]))
    keys = token_keys(packed, 2**62 + 11)
    found = dropped_inputs(keys, 6, 2**61 + 3, 0.4)
    wanted = slow_masks([7, 2, 9, 4, 4], 6, 2**62 + 11, 2**61 + 3, 0.4)
    wanted += slow_masks([5, 130_000], 6, 2**62 + 11, 2**61 + 3, 0.4)
    assert found.tolist() == wanted


def test_the_share_is_the_rate_and_masks_are_unrelated() -> None:
    """200,000 draws: 5 standard deviations are 0.0051 of a share and 0.0112 of a correlation."""
    tokens = [
        [int(number) for number in torch.randint(0, 50, (500,), generator=torch.Generator().manual_seed(1))]
    ]
    packed = pack(rows([[3]], tokens))
    masks = {
        (update, layer): dropped_inputs(token_keys(packed, update), 400, layer, 0.3).double()
        for update in (1, 2)
        for layer in (8, 9)
    }
    for mask in masks.values():
        assert float(mask.mean()) == pytest.approx(0.3, abs=0.0051)
        for other in (
            mask.roll(1, 0),
            mask.roll(1, 1),
            *(each for each in masks.values() if each is not mask),
        ):
            assert abs(float(torch.corrcoef(torch.stack([mask.flatten(), other.flatten()]))[0, 1])) < 0.0112


def test_keys_depend_on_the_row_alone() -> None:
    prompts, responses = [[1, 2, 3], [1, 2, 3], [4, 2]], [[5, 6], [5, 7, 8], [5]]
    whole = token_keys(pack(rows(prompts, responses)), 4)
    alone = [token_keys(pack(rows([p], [r])), 4) for p, r in zip(prompts, responses, strict=True)]
    assert whole.equal(torch.cat(alone))
    assert whole[:4].equal(whole[5:9]), "equal beginnings have equal keys"
    assert len(set(whole.tolist())) == len(whole) - 4, "and nothing else has"
    shared = share_prompts(pack(rows(prompts, responses)))
    assert shared.places is not None and shared.num_tokens == len(whole) - 3
    assert token_keys(shared, 4)[shared.places].equal(whole)
    assert not set(token_keys(pack(rows(prompts, responses)), 5).tolist()) & set(whole.tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_model(
        tmp_path_factory.mktemp("models") / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1
    )


def learned(folder: Path, settings: LoraSettings = SETTINGS) -> PolicyModel:
    policy = build_policy(folder, device="cpu", dtype="float64", probe=False)
    add_lora(policy, settings)
    for number, layer in enumerate(adapted_layers(policy).values()):
        b = layer.lora_B["default"].weight
        b.data.copy_(torch.rand(b.shape, generator=torch.Generator().manual_seed(number)) - 0.5)
    return policy


def test_a_layer_and_its_gradients_by_a_slow_reference(folder: Path) -> None:
    policy = learned(folder)
    name, layer = next(iter(adapted_layers(policy).items()))
    keys = TokenKeys.of(policy)
    assert keys is not None
    packed = packed_rows(tiny_rows())
    keys.choose(policy, packed, update=2)
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, packed.num_tokens, layer.in_features, generator=draw, dtype=torch.float64)
    inputs.requires_grad_()
    weight = torch.randn(1, packed.num_tokens, layer.out_features, generator=draw, dtype=torch.float64)
    found = layer(inputs)
    a, b = layer.lora_A["default"], layer.lora_B["default"].weight
    got = torch.autograd.grad((found * weight).sum(), (inputs, a.weight, b))
    assert isinstance(a, DropoutLinear) and keys.keys is not None
    kept = ~dropped_inputs(keys.keys, layer.in_features, a.seed, 0.3)
    assert float(kept.double().mean()) == pytest.approx(0.7, abs=0.1), name
    wanted = layer.base_layer(inputs) + 6 / 3 * ((inputs * kept / (1 - 0.3)) @ a.weight.T @ b.T)
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    for one, other in zip(
        got, torch.autograd.grad((wanted * weight).sum(), (inputs, a.weight, b)), strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    keys.clear()
    plain = learned(folder, LoraSettings(rank=3, alpha=6, seed=5))
    assert layer(inputs).equal(adapted_layers(plain)[name](inputs)), "without keys nothing is dropped"


def test_the_mean_over_updates_is_the_layer_without_dropout(folder: Path) -> None:
    """2,000 updates; the bound is 5 standard deviations of the mean of what dropout adds."""
    policy = learned(folder)
    layer = next(iter(adapted_layers(policy).values()))
    keys = TokenKeys.of(policy)
    assert keys is not None
    packed = packed_rows(tiny_rows())
    inputs = torch.randn(
        packed.num_tokens, layer.in_features, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    found: list[Tensor] = []
    with torch.no_grad():
        for update in range(2000):
            keys.choose(policy, packed, update)
            found.append(layer(inputs))
        keys.clear()
        plain = layer(inputs)
    drawn = torch.stack(found)
    apart = (drawn.mean(0) - plain) / (drawn.std(0) / 2000**0.5)
    assert float(apart.abs().max()) < 5 and 0.9 < float(apart.std()) < 1.1


def test_without_a_rate_the_layers_are_those_of_before(folder: Path, tmp_path: Path) -> None:
    policy = learned(folder, LoraSettings(rank=3, alpha=6, seed=5))
    assert TokenKeys.of(policy) is None
    assert all(type(each.lora_A["default"]) is torch.nn.Linear for each in adapted_layers(policy).values())
    other = learned(folder)
    assert list(other.state_dict()) == list(policy.state_dict()), "names are the same"
    assert all(other.state_dict()[name].equal(value) for name, value in policy.state_dict().items())
    save_adapter(other, tmp_path)
    assert LoraConfig.from_pretrained(str(tmp_path)).lora_dropout == 0.3, "its folder says the rate"
