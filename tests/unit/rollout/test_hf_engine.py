"""What the hf engine does beyond the conformance suite: whose module it drives, and which models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from rollout_models import Source
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hybridflow.errors import ModelError, RolloutError
from hybridflow.models.attention.layouts import ATTENTION_NAME, PackedLayout
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import (
    GenerationOutput,
    GenerationRequest,
    RolloutStats,
    SamplingParams,
    SomeWeights,
)
from hybridflow.rollout.hf.engine import HFEngine, batches_well

EOS = 2


def model(kind: str = "llama", **settings: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "eos_token_id": EOS, "pad_token_id": 0,
    }  # fmt: skip
    if kind not in ("bloom", "falcon", "mamba", "rwkv"):
        sizes |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hf: PreTrainedModel = (
            AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **settings}))
            .float()
            .eval()
        )
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() > 1:
                parameter *= 5
    return hf


def requests(count: int = 6, **params: Any) -> list[GenerationRequest]:
    sampling = SamplingParams(**{"max_tokens": 8, **params})
    return [
        GenerationRequest(i, Prompt(tuple(range(3 + i, 5 + 3 * i))), sampling, seed=i) for i in range(count)
    ]


def run(engine: HFEngine, wanted: list[GenerationRequest]) -> dict[int, GenerationOutput]:
    return {output.request_id: output for output in engine.generate(wanted)}


@pytest.mark.parametrize("kind", ["bloom", "falcon", "mamba"])
def test_models_that_our_attention_refuses(kind: str) -> None:
    hf = model(kind)
    if kind != "mamba":  # which says so of its attention; the probe finds recurrent layers
        with pytest.raises(ModelError):
            PolicyModel(hf)
    greedy = run(HFEngine(hf, eos_token_ids=(EOS,)), requests(greedy=True))
    config = GenerationConfig(do_sample=False, max_new_tokens=8, pad_token_id=0)
    either: Any = hf
    for request in requests():
        prompt = torch.tensor([request.prompt_token_ids])
        assert (
            greedy[request.request_id].token_ids
            == either.generate(prompt, generation_config=config)[0, prompt.shape[1] :].tolist()
        )
    drawn = run(HFEngine(hf, eos_token_ids=(EOS,)), requests(temperature=0.8))
    for number, output in run(
        HFEngine(hf, eos_token_ids=(EOS,), max_num_seqs=1), requests(temperature=0.8)
    ).items():
        assert output.token_ids == drawn[number].token_ids


def test_a_model_that_padding_disturbs_gets_one_row_at_a_time() -> None:
    hf = model("rwkv", attention_hidden_size=32)
    assert not batches_well(hf) and batches_well(model())
    engine = HFEngine(hf, eos_token_ids=(EOS,))
    together = run(engine, requests())
    assert engine.stats.max_rows == 1
    assert all(
        run(engine, [request])[request.request_id] == together[request.request_id] for request in requests()
    )


def test_it_leaves_the_shared_module_as_it_was() -> None:
    policy = PolicyModel(model())
    policy.hf.generation_config = habits = GenerationConfig(
        top_k=1, repetition_penalty=3.0, do_sample=True, temperature=0.1
    )
    layout = PackedLayout.build([3])
    ids = torch.tensor([[5, 6, 7]])
    before = policy.hidden(ids, torch.arange(3)[None], layout)
    policy.train()
    policy.hf.model.norm.eval()
    wanted = run(HFEngine(model(), eos_token_ids=(EOS,)), requests(temperature=0.9))
    # the model's habits do not count
    assert run(HFEngine(policy.hf, eos_token_ids=(EOS,)), requests(temperature=0.9)) == wanted
    assert policy.hf.config._attn_implementation == ATTENTION_NAME and policy.hf.generation_config is habits
    assert policy.training and policy.hf.model.layers[1].training and not policy.hf.model.norm.training
    policy.eval()
    assert torch.equal(policy.hidden(ids, torch.arange(3)[None], layout), before)


def test_weights_with_a_source_are_there_while_the_engine_is_awake() -> None:
    source = Source()
    engine = HFEngine(model(), eos_token_ids=(EOS,), source=source)
    with pytest.raises(RolloutError, match="wake_up"):
        engine.generate(requests())
    engine.set_version(4)
    engine.wake_up()
    engine.wake_up()
    stream: Iterator[GenerationOutput] = engine.generate(requests())
    assert next(stream).policy_versions[0] == 4
    with pytest.raises(RolloutError, match="while generate"):
        engine.sleep()
    assert len(list(stream)) == 5
    engine.sleep()
    assert source.events == [4, "released"]


def test_batches_are_as_large_as_told_and_may_be_left_early() -> None:
    engine = HFEngine(model(), eos_token_ids=(EOS,), max_num_seqs=2)
    stream = engine.generate(requests(ignore_eos=True))
    next(stream)
    # request 1 is done, and comes out of the stream
    assert {output.request_id for output in engine.abort([1, 4])} == {4}
    assert [output.request_id for output in stream] == [1, 2, 3, 5]
    assert engine.stats == RolloutStats(
        generated_tokens=40,
        prefill_tokens=2 + 4 + 6 + 8 + 12,
        decode_steps=21,
        max_rows=2,
        seconds=engine.stats.seconds,
    )
    other = engine.generate(requests())
    next(other)
    other.close()  # type: ignore[attr-defined]
    assert len(run(engine, requests())) == 6


def test_a_row_of_the_batch_that_runs_ends_before_its_next_token() -> None:
    """As another thread would tell it, from inside of a forward pass."""
    engine = HFEngine(model(), eos_token_ids=(EOS,))
    whole = run(engine, requests(ignore_eos=True))
    ended: list[GenerationOutput] = []
    calls = iter(range(100))
    handle = engine.model.register_forward_pre_hook(
        lambda *_: ended.extend(engine.abort([3, 4])) if next(calls) == 5 else None
    )
    rest = {output.request_id: output for output in engine.generate(requests(ignore_eos=True))}
    handle.remove()
    assert sorted(rest) == [0, 1, 2, 5] and all(rest[number] == whole[number] for number in rest)
    assert sorted(output.request_id for output in ended) == [3, 4]
    for output in ended:
        assert output.finish_reason == "abort" and len(output.token_ids) == 5
        assert output.token_ids == whole[output.request_id].token_ids[:5]


def test_what_it_cannot_serve_is_told_of_that_request() -> None:
    engine = HFEngine(model(), eos_token_ids=(EOS,))
    outputs = run(engine, [requests(1, stop=("x",))[0], *requests(2)[1:]])
    assert "decode" in str(outputs[0].error) and outputs[1].finish_reason in ("stop", "length")
    with torch.no_grad():
        engine.model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    broken = run(engine, requests(2))
    assert all(
        output.finish_reason == "error" and "diverged" in str(output.error) for output in broken.values()
    )
    with pytest.raises(RolloutError, match="no weight of that name"):
        engine.update_weights([("nonsense", torch.zeros(1))], 1)


def test_weights_that_are_missing_are_named() -> None:
    engine = HFEngine(model(tie_word_embeddings=True), eos_token_ids=(EOS,))
    weights = {name: weight.clone() for name, weight in engine.model.state_dict().items()}
    lost = [name for name in weights if "layers.1.mlp" in name]
    some = [(name, weight) for name, weight in weights.items() if name not in lost]
    with pytest.raises(RolloutError, match=rf"missing: {lost[0]}, {lost[1]}.*give it all of them"):
        engine.update_weights(some, version=3)
    assert engine.policy_version == 0
    engine.update_weights(SomeWeights(some), version=3)
    engine.update_weights([(n, w) for n, w in weights.items() if n != "lm_head.weight"], version=4)
    assert engine.policy_version == 4, "it is tied to the embeddings, which have come"
