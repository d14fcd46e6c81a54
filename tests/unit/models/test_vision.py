"""Models that read pictures: the same log-probs as transformers, gradients to the tower, no placeholder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForImageTextToText

from hybridflow.engines.build import build_engine
from hybridflow.errors import ModelError
from hybridflow.models.adapters.lora import LoraSettings, adapted_layers, add_lora
from hybridflow.models.files.probe import probe_policy
from hybridflow.models.parallel.stages import Stage
from hybridflow.models.parallel.tensor_parallel import tensor_styles
from hybridflow.models.policy import PolicyModel, sequence_cut
from hybridflow.models.vision import placeholder_ids
from hybridflow.protocol.packing import pack, share_prompts
from hybridflow.protocol.prompt import make_position_ids
from picture_models import FAMILIES, picture_model, picture_policy, picture_prompt, rows_with_media

QWEN = [family for family in FAMILIES if family.startswith("qwen")]


def rows(policy: PolicyModel, *pictures: int):
    prompts = [picture_prompt(policy, picture, start=2 + number) for number, picture in enumerate(pictures)]
    return rows_with_media(prompts, [[30 + number, 40, 41] for number in range(len(pictures))])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_and_cached_log_probs_are_those_of_transformers(family: str) -> None:
    assert probe_policy(picture_policy(family)) < 1e-4


def test_the_probe_finds_positions_that_are_only_the_length_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = picture_policy("qwen3_vl")
    monkeypatch.setattr(
        "hybridflow.models.files.probe.make_position_ids", lambda length, media: torch.arange(length)
    )
    with pytest.raises(ModelError, match="does not give the same log-probs"):
        probe_policy(policy)


@pytest.mark.parametrize("family", QWEN)
def test_positions_are_those_of_the_model_itself(family: str) -> None:
    policy = picture_policy(family)
    first = picture_prompt(policy, 1, start=3).media[0]
    second = replace(first, start=first.start + first.length + 2, digest="second")
    ids = [5] * (second.start + second.length + 3)
    for medium in (first, second):
        ids[medium.start : medium.start + medium.length] = [policy.vision.placeholder] * medium.length
    row = torch.tensor(ids)[None]
    wanted, _ = policy.hf.base_model.get_rope_index(
        row,
        mm_token_type_ids=(row == policy.vision.placeholder).int(),
        image_grid_thw=torch.stack([medium.values["grid_thw"] for medium in (first, second)]),
    )
    assert torch.equal(make_position_ids(len(ids), (first, second)), wanted[:, 0])


@pytest.mark.parametrize("family", ["qwen3_vl", "smolvlm"])
def test_gradients_reach_the_tower_and_a_picture_is_read_once(family: str) -> None:
    policy = picture_policy(family)
    calls = []
    policy.vision.tower.register_forward_hook(lambda module, inputs, output: calls.append(1))
    packed = pack(rows(policy, 1, 1, 2))
    policy(packed).log_probs.sum().backward()
    assert len(calls) == 1, "one pass for all pictures"
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0
        for parameter in policy.vision.tower.parameters()
    )
    read = policy.vision.inputs(packed.input_ids[None], packed.media)
    first, second, third = (each.place for each in packed.media)
    length = packed.media[0].count
    assert torch.equal(read.embeds[0, first : first + length], read.embeds[0, second : second + length])
    assert not torch.equal(read.embeds[0, first : first + length], read.embeds[0, third : third + length])


def test_rows_that_share_a_prompt_give_the_same_log_probs() -> None:
    policy = picture_policy()
    prompts = [picture_prompt(policy, picture) for picture in (1, 2, 1, 2)]
    packed = pack(rows_with_media(prompts, [[30, 31], [32], [33, 34, 35], [36]]))
    shared = share_prompts(packed)
    assert shared.num_tokens == packed.num_tokens - 2 * len(prompts[0])
    torch.testing.assert_close(policy(shared).log_probs, policy(packed).log_probs, atol=1e-5, rtol=0)


def test_gradient_checkpointing_changes_nothing() -> None:
    plain = picture_policy()
    again = picture_policy(gradient_checkpointing=True).train()
    for policy in (plain, again):
        policy(pack(rows(policy, 1, 2))).log_probs.sum().backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_adapters_leave_the_tower_out() -> None:
    policy = picture_policy()
    add_lora(policy, LoraSettings(rank=2))
    names = list(adapted_layers(policy))
    assert names and all("language_model" in name for name in names)
    policy(pack(rows(policy, 1))).log_probs.sum().backward()
    assert not any(parameter.requires_grad for parameter in policy.vision.tower.parameters())


def test_a_frozen_tower_has_no_gradients_and_a_text_model_has_none_to_freeze(tmp_path) -> None:
    arguments = {"path": str(picture_model()), "device": "cpu", "probe": False}
    engine = build_engine("policy", arguments, name="actor", optim=None, freeze_vision_tower=True)
    policy = engine.policy
    policy.vision.text.requires_grad_(True)
    policy(pack(rows(policy, 1))).log_probs.sum().backward()
    assert all(parameter.grad is None for parameter in policy.vision.tower.parameters())
    from hybridflow.models.tiny import create_tiny_model

    text = create_tiny_model(tmp_path / "text", hidden=16, layers=1, heads=2, kv_heads=1, intermediate=16)
    with pytest.raises(ModelError, match="freeze_vision_tower=true, and the model reads text alone"):
        build_engine(
            "policy", {**arguments, "path": str(text)}, name="a", optim=None, freeze_vision_tower=True
        )


def test_placeholders_have_no_probability_in_training() -> None:
    policy = picture_policy()
    packed = pack(rows(policy, 1, 2))
    found = policy(packed, with_entropy=True, with_sum_pi_squared=True)
    forbidden = list(placeholder_ids(policy.config))
    assert len(forbidden) == 2, "pictures and videos"
    with torch.no_grad():
        policy.transform = replace(policy.transform, forbidden=())
        states = policy(packed)  # the distribution with all tokens, for comparison
        hidden = policy.hidden(
            packed.input_ids[None],
            packed.position_ids[:, None],
            _layout(packed),
            packed.media,
        )[0, packed.predict_index]
        logits = (hidden.double() @ policy.head.weight.double().T).clone()
    logits[:, forbidden] = -float("inf")
    log_p = logits.log_softmax(-1)
    wanted = log_p.gather(1, packed.targets[:, None])[:, 0]
    torch.testing.assert_close(found.log_probs.double(), wanted, atol=1e-4, rtol=1e-5)
    p = log_p.exp()
    entropy = -(p * log_p.clamp(min=-1e4)).sum(-1)
    torch.testing.assert_close(found.entropy.double(), entropy, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(states.log_probs, found.log_probs), "they had probability before"


def test_the_exact_kl_from_itself_is_nothing() -> None:
    policy = picture_policy()
    packed = pack(rows(policy, 1, 2))
    policy.reference = policy.head_inputs
    kl = policy(packed, with_full_kl=True).full_kl
    assert kl.abs().max() < 1e-5
    kl.sum().backward()
    assert bool(policy.head.weight.grad.isfinite().all())


def test_features_of_deep_layers_may_come_unsplit(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = picture_policy("qwen3_vl")
    packed = pack(rows(policy, 1, 2))
    wanted = policy(packed).log_probs
    base = policy.hf.base_model
    read = base.get_image_features

    def as_in_transformers_5_17(*args, **kwargs):
        found = read(*args, **kwargs)
        deep = found.deepstack_features
        found.deepstack_features = [torch.cat(each) if isinstance(each, tuple) else each for each in deep]
        return found

    monkeypatch.setattr(base, "get_image_features", as_in_transformers_5_17)
    assert torch.equal(policy(packed).log_probs, wanted)


def test_a_picture_with_another_number_of_features_is_refused() -> None:
    policy = picture_policy()
    prompt = picture_prompt(policy, 1)
    short = replace(prompt.media[0], length=4, positions=prompt.media[0].positions[:, :4])
    batch = rows_with_media([replace_media(prompt, short)], [[30]])
    with pytest.raises(ModelError, match="4 placeholders in the prompt and 6 features"):
        policy(pack(batch))


def test_what_is_saved_is_read_by_transformers(tmp_path) -> None:
    from hybridflow.models.files.export import save_hf

    policy = picture_policy("qwen2_5_vl")
    save_hf(policy, tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path)
    for name, parameter in policy.hf.state_dict().items():
        assert torch.equal(parameter, again.state_dict()[name]), name


def replace_media(prompt, medium):
    return type(prompt)(prompt.token_ids, (medium,))


def _layout(packed):
    from hybridflow.models.attention.layouts import PackedLayout

    return PackedLayout.build(packed.lengths)


class TwoRanks:
    """Stands for a group of two ranks."""

    def size(self) -> int:
        return 2


def test_layouts_that_cut_rows_or_models_refuse_pictures() -> None:
    policy = picture_policy()
    packed = pack(rows_with_media([picture_prompt(policy, 1)], [[30, 31]]))
    with pytest.raises(ModelError, match="ulysses_sequence_parallel_size above 1\\) cannot read pictures"):
        sequence_cut(packed, TwoRanks(), policy.config)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="reads pictures, and only models of text are cut"):
        tensor_styles(policy.hf)
    with pytest.raises(ModelError, match="'qwen3_vl'\\) has no plan of stages"):
        Stage(policy, stage=0, stages=2, parts=2)
