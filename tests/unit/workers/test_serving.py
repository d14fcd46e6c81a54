"""Serving without an end and weights in flight, in this process; the same scenes run on Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving_scenes import (
    SCENES,
    Groups,
    factories,
    keeping_factories,
    request,
    scored,
    serving_all_the_time,
    submit,
)
from transformers import DynamicCache

from hybridflow.controller import LocalBackend
from hybridflow.errors import RolloutError
from hybridflow.models.policy import PolicyModel
from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationOutput, GenerationRequest
from hybridflow.rollout.native.generation import Generation

sys.path.insert(0, str(Path(__file__).parents[1] / "rollout"))


class Apart(LocalBackend):
    """One process that says it is two."""

    def together(self, role: str, other: str) -> bool:
        return False


@pytest.mark.parametrize("scene", SCENES)
def test_in_this_process(scene: Callable[[Groups], None]) -> None:
    scene(Groups(Apart(factories)))


def test_a_shared_module_cannot_be_staged() -> None:
    groups = Groups(LocalBackend(factories))
    assert not groups.rollout.can_stage(groups.actor)
    with pytest.raises(RolloutError, match=r"version 3 cannot be staged.*trainer\.placement\.rollout"):
        groups.rollout.stage(groups.actor, 3)


def with_kept_keys(
    policies: dict[int, PolicyModel], asked: GenerationRequest, output: GenerationOutput
) -> list[float]:
    """Log-probs of a response whose keys and values stay as the weights of their time made them: a token is
    read, and its successor scored, by the weights that sampled the successor.
    """
    cache = DynamicCache()
    log_probs = []
    new = list(asked.prompt_token_ids)
    for token, version in zip(output.token_ids, output.policy_versions):
        hf = policies[version].hf
        hf.set_attn_implementation("eager")
        with torch.no_grad():
            logits = hf(torch.tensor([new]), past_key_values=cache, use_cache=True).logits[0, -1]
        log_probs.append(float(logits.log_softmax(-1)[token]))
        new = [token]
    return log_probs


def test_kept_keys_and_values_give_the_log_probs_of_the_mixed_cache() -> None:
    groups = Groups(Apart(keeping_factories))
    group = groups.rollout
    asked = request(1)
    with group.opened(), serving_all_the_time(group):
        heard = submit(group, [asked])[1]
        for version in (1, 2):
            submit(group, [request(10 * version + 1, 4)])[10 * version + 1].result(60)
            groups.learn(0.4)
            group.update_from(groups.actor, version)
        output = heard.result(60)
    assert set(output.policy_versions) == {0, 1, 2}
    policies = {version: groups.policy(version) for version in range(3)}
    assert output.log_probs == pytest.approx(with_kept_keys(policies, asked, output), abs=1e-4)
    anew = [scored(policies[version], asked, output) for version in range(3)]
    of_their_version = [anew[version][place] for place, version in enumerate(output.policy_versions)]
    assert output.log_probs != pytest.approx(of_their_version, abs=1e-3), "nothing was computed again"


@pytest.mark.parametrize("salted", [True, False])
def test_no_prefix_is_hit_across_versions(salted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One session over two versions; without following the weights, the second reads keys of the first."""
    if not salted:
        monkeypatch.setattr(Generation, "_follow_weights", lambda self: None)
    groups = Groups(Apart(keeping_factories))
    group = groups.rollout
    first = request(1, 24)
    with group.opened(), serving_all_the_time(group):
        output = submit(group, [first])[1].result(60)
        groups.learn(0.4)
        group.update_from(groups.actor, 1)
        longer = request(2, 12)
        longer = replace(longer, prompt=Prompt(first.prompt_token_ids + tuple(output.token_ids)))
        second = submit(group, [longer])[2].result(60)
    wanted = scored(groups.policy(1), longer, second)
    assert (second.log_probs == wanted) == salted
