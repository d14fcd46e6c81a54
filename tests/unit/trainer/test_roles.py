"""Which roles a run has, and what is asked of the models behind them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tiny_trainer import build, ppo_config, tiny_model

from hybridflow.config import PPOConfig
from hybridflow.config.layout import ROLE_KEYS, VALIDATION, engine_keys
from hybridflow.config.model import FSDPConfig, ModelConfig
from hybridflow.config.tree import get_value
from hybridflow.errors import ConfigError, ModelError
from hybridflow.trainer.ppo.build import PPOTrainer
from hybridflow.trainer.roles.roles import ROLES, Roles, needed_roles

OWN = """
from hybridflow.algorithms.aggregation import LossOutput

def plain(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards

def distils(teacher_log_probs, old_log_probs, response_mask):
    gap = (teacher_log_probs - old_log_probs) * response_mask
    return gap, gap

def process(process_rewards, response_mask):
    return process_rewards, process_rewards

def judged(rm_scores, response_mask, process_rewards=None):
    advantages = (rm_scores[:, None] + process_rewards) * response_mask
    return advantages, advantages

def if_there(token_level_rewards, response_mask, process_rewards=None, ref_log_prob=None):
    return token_level_rewards, token_level_rewards

def loss(log_prob, old_log_prob, advantages, response_mask, scale, rollout_is_weights=None, *, ref_log_prob):
    return LossOutput((log_prob - ref_log_prob).sum() / scale.num_tokens, {})
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


@pytest.mark.parametrize(
    ("settings", "roles"),
    [
        (["algorithm.adv_estimator=gae"], "critic"),
        (["algorithm.adv_estimator=grpo"], ""),
        (["algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=true"], "reference"),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true"], "reference"),
        (
            ["algorithm.adv_estimator=grpo", "reward.process_reward_model.enable=true"],
            "reference process_reward",
        ),
        (["algorithm.adv_estimator='OWN:plain'"], ""),
        (["algorithm.adv_estimator='OWN:distils'"], "teacher"),
        (["algorithm.adv_estimator='OWN:process'"], "reference process_reward"),
        (["algorithm.adv_estimator='OWN:if_there'"], "reference"),
        (
            [
                "algorithm.adv_estimator='OWN:plain'",
                "actor_rollout_ref.actor.policy_loss.loss_mode='OWN:loss'",
            ],
            "reference",
        ),
    ],
)
def test_roles_follow_from_what_is_named(
    model: Path, own: Path, tmp_path: Path, settings: list[str], roles: str
) -> None:
    config = ppo_config(model, tmp_path / "run", *(text.replace("OWN", str(own)) for text in settings))
    assert needed_roles(config) == ["actor", "rollout", *roles.split()]


def test_records_keys_and_groups_are_of_the_same_roles() -> None:
    names = [spec.name for spec in ROLES]
    assert names == list(ROLE_KEYS)
    # the replica that validates beside training is never the steps' own: it lives and dies apart
    assert {*names} - {VALIDATION} == {field.name for field in fields(Roles)}
    config = PPOConfig()
    for name, keys in ROLE_KEYS.items():
        sharding, sequence, model = engine_keys(config, name)
        assert isinstance(sharding, FSDPConfig) and sequence == 1 and isinstance(model, ModelConfig)
        if keys.updates:
            block = get_value(config, keys.updates)
            assert block.optim.lr > 0 and "model" in block.checkpoint.save_contents, name


def test_a_teacher_is_another_model_and_is_never_trained(model: Path, own: Path, tmp_path: Path) -> None:
    teacher = tiny_model(tmp_path / "teacher", hidden=48, layers=1, seed=3)
    settings = (f"algorithm.adv_estimator='{own}:distils'", f"distillation.teacher_model.path='{teacher}'")
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        group = trainer.step.roles.teacher
        assert group is not None
        module = group.backend.worker("teacher").engine.module
        before = [parameter.clone() for parameter in module.parameters()]
        assert before[0].shape[1] == 48 and not any(
            parameter.requires_grad for parameter in module.parameters()
        )
        metrics = trainer.fit()
        assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
        assert metrics and "teacher" not in trainer.store.load(trainer.state.save(trainer.store)).engines


def test_a_teacher_must_be_given_and_read_the_same_tokens(model: Path, own: Path, tmp_path: Path) -> None:
    settings = (f"algorithm.adv_estimator='{own}:distils'",)
    with (
        pytest.raises(ConfigError, match=r"distillation\.teacher_model\.path is not set"),
        build(ppo_config(model, tmp_path / "run", *settings)),
    ):
        pass
    other = tiny_model(tmp_path / "other")
    _change_vocabulary(other, by=-8)
    given = f"distillation.teacher_model.path='{other}'"
    with (
        pytest.raises(
            ModelError, match=r"teacher_model has a vocabulary of (\d+) tokens and the actor one of (\d+)"
        ),
        build(ppo_config(model, tmp_path / "run", *settings, given)),
    ):
        pass


def test_heads_may_be_padded_to_different_sizes(own: Path, tmp_path: Path) -> None:
    """Models of one family have one tokenizer and rows of padding beyond it, each its own number of them."""
    actor, teacher = tiny_model(tmp_path / "actor"), tiny_model(tmp_path / "teacher", seed=3)
    settings = (f"algorithm.adv_estimator='{own}:distils'", f"distillation.teacher_model.path='{teacher}'")
    _change_vocabulary(teacher, by=8)
    with build(ppo_config(actor, tmp_path / "run", *settings)) as trainer:
        assert _heads(trainer)[1] == _heads(trainer)[0] + 8
        batch = trainer.source.next(1).rows
        _, metrics = trainer.step(batch, 1)
        assert metrics.to_floats()["actor/num_updates"] == 2.0
    _change_vocabulary(actor, by=16)
    with build(ppo_config(actor, tmp_path / "run", *settings)) as trainer:
        ours, theirs = _heads(trainer)
        assert ours == theirs + 8
        padding = batch.select()
        padding.batch["input_ids"] = padding.batch["input_ids"].clone()
        padding.batch["input_ids"][0, -1] = theirs
        del padding.remote["input_ids"]  # workers would read the old values
        assert trainer.step.roles.teacher is not None
        with pytest.raises(
            ModelError,
            match=f"token id {theirs}, which is padding of its own head, and this model has {theirs} rows",
        ):
            trainer.step.roles.teacher.log_probs(padding)


def _heads(trainer: PPOTrainer) -> list[int]:
    backend = trainer.step.roles.actor.backend
    return [backend.worker(name).engine.module.head.weight.shape[0] for name in ("actor", "teacher")]  # type: ignore[attr-defined]


def _change_vocabulary(folder: Path, by: int) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(model.config.vocab_size + by)
    model.save_pretrained(folder)


def test_the_process_reward_model_starts_as_the_actor_or_from_its_own_path(
    model: Path, own: Path, tmp_path: Path
) -> None:
    process = f"algorithm.adv_estimator='{own}:process'"
    other = tiny_model(tmp_path / "other", hidden=48, layers=1, seed=3)
    for path, width in ((None, 32), (other, 48)):
        given = [] if path is None else [f"reward.process_reward_model.model.path='{path}'"]
        with build(ppo_config(model, tmp_path / f"run_{width}", process, *given)) as trainer:
            roles = trainer.step.roles
            assert roles.process_reward is not None
            weights = roles.process_reward.weights()
            assert weights["hf.model.embed_tokens.weight"].shape[1] == width
            if path is None:
                assert all(torch.equal(value, roles.actor.weights()[name]) for name, value in weights.items())


def is_in_file(module: torch.nn.Module, file: Path) -> bool:
    """Whether all weights of a module are pages of the file, which the processes of a machine share."""
    maps = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    of_file = [each[0].split("-") for each in maps if each[-1] == str(file)]
    places = [(int(start, 16), int(end, 16)) for start, end in of_file]
    return all(
        any(start <= weight.data_ptr() < end for start, end in places) for weight in module.parameters()
    )


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list its mappings")
def test_actor_and_reference_share_what_is_read_and_one_is_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed = []
    monkeypatch.setattr("hybridflow.models.files.build.probe_policy", probed.append)
    model = tiny_model(tmp_path / "model")
    keys = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.use_kl_loss=true")
    with build(ppo_config(model, tmp_path / "run", *keys)) as trainer:
        backend = trainer.step.roles.actor.backend
        modules = [backend.worker(role).engine.module for role in ("actor", "reference")]  # type: ignore[attr-defined]
        assert probed == modules[:1]
        assert all(is_in_file(module, model / "model.safetensors") for module in modules)
    other = tiny_model(tmp_path / "other")
    own = f"actor_rollout_ref.ref.model.path={other}"
    with build(ppo_config(model, tmp_path / "second", *keys, own)):
        assert len(probed) == 3, "a reference of its own is another model"
