"""New weights and freed memory."""

from __future__ import annotations

import pytest
import torch
from subjects import Subject, prompts, requests_for

from hybridflow.config.engine_features import TABLE
from hybridflow.errors import RolloutError

LOST = "model.layers.1.mlp.down_proj.weight"


def other_weights(subject: Subject) -> dict[str, torch.Tensor]:
    """Every matrix moved a little, tied ones together."""
    return {
        name: weight + 0.05 * weight.roll(1, -1) if weight.dim() > 1 else weight
        for name, weight in subject.weights.items()
    }


def test_an_update_changes_the_output_and_carries_its_version(subject: Subject) -> None:
    subject.needs("weight_updates")
    given = prompts(8, seed=20)
    requests = requests_for(given, greedy=True, ignore_eos=True)
    before = subject.run(requests)
    version = subject.give(other_weights(subject))
    after = subject.run(requests)
    assert subject.engine.policy_version == version
    assert all(set(output.policy_versions) == {version} for output in after.values())
    # the push was no no-op
    assert sum(before[place].token_ids != after[place].token_ids for place in before) >= 4
    for place, prompt in enumerate(given):  # and they are the new weights, all of them
        tokens = after[place].token_ids
        right = subject.logits(prompt, tokens).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(after[place].log_probs), right, atol=1e-4, rtol=0)
    subject.give(subject.weights)
    assert [subject.run(requests)[place].token_ids for place in before] == [
        output.token_ids for output in before.values()
    ]


def test_a_dropped_push_is_found(subject: Subject) -> None:
    subject.needs("dropped_push")
    requests = requests_for(prompts(4, seed=21), greedy=True)
    before = subject.run(requests)
    version = subject.version
    with pytest.raises(RolloutError):
        subject.give(other_weights(subject), lost=LOST)
    # who asks for that version is told that it is not there
    assert subject.engine.policy_version != version + 1
    subject.give(subject.weights)
    assert subject.run(requests)[0].token_ids == before[0].token_ids


def test_sleep_frees_memory_and_waking_up_restores_the_output(subject: Subject) -> None:
    requests = requests_for(prompts(6, seed=22), n=2)
    before = subject.run(requests)
    held = subject.held() if subject.held is not None else None
    subject.engine.sleep()
    if TABLE[subject.name]["sleep"].has and subject.held is not None and held is not None:
        assert held > 0 and subject.held() < held
    subject.engine.wake_up()
    after = subject.run(requests)
    assert {number: output.token_ids for number, output in after.items()} == {
        number: output.token_ids for number, output in before.items()
    }
