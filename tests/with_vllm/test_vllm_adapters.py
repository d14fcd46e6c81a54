"""LoRA adapters that are pushed by themselves: vLLM computes base and adapters as the actor's module does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_vllm_engines import PROMPTS, furthest, run
from vllm_models import EOS, requests_for, tiny

from hybridflow.config.actor_rollout_ref import RolloutConfig
from hybridflow.errors import RolloutError
from hybridflow.models.adapters.lora import LoraSettings, add_lora, is_adapter
from hybridflow.models.files.export import plain_weights
from hybridflow.models.policy import PolicyModel
from hybridflow.rollout.remote.model import ModelFacts
from hybridflow.rollout.vllm.build import build_vllm_engine
from hybridflow.rollout.vllm.engine import VLLMEngine
from hybridflow.weight_sync.push import LocalPush
from hybridflow.weight_sync.wire.receiver import NOTHING
from hybridflow.weight_sync.wire.transports import MEMORY

TOLERANCE = 5e-4
"""nats. One multiplies base and adapters apart, the other together, and these adapters are large:
3e-5 to 1.3e-4 over four seeds on an Intel CPU; adapters that are wrong or missing are off by whole nats.
"""


def build(folder: str, *, server: bool) -> VLLMEngine:
    config = RolloutConfig(name="vllm", max_model_len=128, max_num_seqs=64, lora_as_adapters=True)
    config = replace(config, server=replace(config.server, enable=server, start_timeout=300, push_timeout=60))
    return build_vllm_engine(config, ModelFacts(folder, torch.device("cpu"), "float32", lora_rank=4), [EOS])


@pytest.fixture(scope="module", params=["in process", "server"])
def adapted(request: pytest.FixtureRequest, folder: str) -> Iterator[VLLMEngine]:
    made = build(folder, server=request.param == "server")
    yield made
    made.close()


def actor(seed: int) -> PolicyModel:
    """With adapters that change what it says."""
    policy = PolicyModel(tiny(0))
    add_lora(policy, LoraSettings(rank=4, alpha=16))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if is_adapter(name):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))
    return policy


def folded(policy: PolicyModel) -> Any:
    """The same in transformers' own words, without adapters."""
    hf = tiny(0)
    hf.load_state_dict(dict(plain_weights(policy)))
    return hf


def test_adapters_go_over_a_base_that_is_sent_once(
    adapted: VLLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushes: list[tuple[str, int]] = []
    plain = adapted.runner.push

    def counted(
        weights: Any, version: int, part: str = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        weights = list(weights)
        pushes.append((part, sum(tensor.numel() for _, tensor in weights)))
        plain(weights, version, part, adapter)  # type: ignore[arg-type]

    monkeypatch.setattr(adapted.runner, "push", counted)
    said = []
    for version, seed in ((1, 5), (2, 6)):
        policy = actor(seed)
        LocalPush(policy, adapters=True).update(adapted, version)
        outputs = run(adapted, greedy=True)
        assert furthest(folded(policy), outputs) < TOLERANCE
        assert {number for output in outputs for number in output.policy_versions} == {version}
        sampled = run(adapted, temperature=0.7, top_p=0.9)
        assert furthest(folded(policy), sampled, 0.7) < TOLERANCE
        said.append([output.token_ids for output in outputs])
    assert said[0] != said[1]
    base = sum(parameter.numel() for name, parameter in actor(5).named_parameters() if not is_adapter(name))
    small = sum(parameter.numel() for name, parameter in actor(5).named_parameters() if is_adapter(name))
    sizes = dict(pushes[:2])
    assert [part for part, _ in pushes] == ["base", "adapters", "adapters"]
    assert sizes["adapters"] == pushes[2][1] == small and sizes["base"] >= base
    assert not list(MEMORY.glob("hybridflow_adapter_*")), "what went to vLLM's loader is gone"


def test_adapters_that_get_lost_are_found(adapted: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, other = actor(7), actor(8)
    LocalPush(policy, adapters=True).update(adapted, 3)
    plain = adapted.runner.push
    with monkeypatch.context() as dropping:
        dropping.setattr(adapted.runner, "push", lambda *given: None)
        with pytest.raises(RolloutError, match="which says it has version 3"):
            LocalPush(other, adapters=True).update(adapted, 4)

    def shortened(weights: Any, version: int, part: str, adapter: dict[str, Any]) -> None:
        plain(list(weights)[:-1], version, part, adapter)  # type: ignore[arg-type]

    with monkeypatch.context() as shortening:
        shortening.setattr(adapted.runner, "push", shortened)
        with pytest.raises(RolloutError, match="tensors that an earlier push had are not in this one"):
            LocalPush(other, adapters=True).update(adapted, 4)
    with pytest.raises(RolloutError, match="only a part of a push came"):
        list(adapted.generate(requests_for(PROMPTS[:1])))
    LocalPush(other, adapters=True).update(adapted, 4)
    assert furthest(folded(other), run(adapted, greedy=True)) < TOLERANCE


def test_adapters_need_their_base(adapted: VLLMEngine) -> None:
    adapted.update_base(plain_weights(actor(7), folded=False))
    assert adapted.has_base and adapted.policy_version == NOTHING
    with pytest.raises(RolloutError, match="no weights yet, or only a part"):
        list(adapted.generate(requests_for(PROMPTS[:1])))
    with pytest.raises(RolloutError, match="lora_as_adapters"):
        LocalPush(actor(7)).update(adapted, 5)
