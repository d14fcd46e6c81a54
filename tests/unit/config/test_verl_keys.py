"""Every key of verl's documents is native, an alias, without effect, or refused with a reason; none is
unknown, none is lost silently.

The documents themselves are not part of the project: the commands, YAML blocks and tables of keys in them are
repeated in verl_documents.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from possible_run import table

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.checks.root import find_notes
from hybridflow.config.load import load_config
from hybridflow.config.trainer import PrometheusConfig
from hybridflow.config.tree import flatten, get_value, is_native, keys_of
from hybridflow.config.verl_keys import Rule, _ruled, status, tables
from hybridflow.errors import ConfigError

BOTH = {**keys_of(PPOConfig), **keys_of(SFTConfig)}
ROOTS = {"PPOConfig": PPOConfig, "SFTConfig": SFTConfig}
VERL = table("verl_documents.yaml")


def settings(text: str) -> list[tuple[str, Any]]:
    """Overrides found in a command line, and their values as YAML reads them."""
    found = re.findall(r"(?:^|\s)\+?([a-z_][\w]*(?:\.\w+)+)=(\S*)", text)
    assert found
    return [(path, yaml.safe_load(value)) for path, value in found]


def assert_known(root: type, found: list[tuple[str, Any]]) -> None:
    for path, value in found:
        result = status(root, path, value)
        assert result.kind != "unknown", f"{path}={value}"
        assert result.kind == "native" or result.reason, f"{path}={value} has no reason"
        if result.kind in ("native", "alias"):
            assert is_native(root, result.path), path


def test_every_override_of_the_documents_is_known() -> None:
    found = settings(VERL["commands"])
    assert len(found) > 60
    assert_known(PPOConfig, found)


@pytest.mark.parametrize("block", [*VERL["ppo_blocks"], VERL["megatron_optimizer"]])
def test_every_yaml_block_of_the_documents_is_known(block: dict[str, Any]) -> None:
    assert_known(PPOConfig, flatten(block))


def test_every_sft_key_of_the_documents_is_known() -> None:
    assert_known(SFTConfig, flatten(VERL["sft_block"]))


@pytest.mark.parametrize(
    ("root", "block"),
    [
        (PPOConfig, VERL["ppo_reference"]),
        (PPOConfig, VERL["megatron_optimizer"]),
        (SFTConfig, VERL["sft_reference"]),
    ],
)
def test_verls_own_defaults_are_accepted(root: type, block: dict[str, Any]) -> None:
    found = flatten(block)
    assert_known(root, found)
    refused = {
        path: status(root, path, value).reason
        for path, value in found
        if status(root, path, value).kind == "refused"
    }
    assert not refused


def test_verls_defaults_of_the_algorithms_load_to_ours(tmp_path: Path) -> None:
    block = VERL["ppo_reference"]["algorithm"]
    (tmp_path / "verl.yaml").write_text(
        yaml.safe_dump({"algorithm": block, "distillation": {"enabled": False}})
    )
    loaded = load_config(PPOConfig, recipe=tmp_path / "verl.yaml")
    ours = PPOConfig().algorithm
    assert replace(loaded.config.algorithm, filter_groups=ours.filter_groups) == ours
    assert loaded.config.algorithm.filter_groups == replace(ours.filter_groups, max_num_gen_batches=0)
    assert "algorithm.filter_groups.metric=null is now acc" in loaded.notes


def test_values_of_verl_that_have_another_name_here() -> None:
    loaded = load_config(
        PPOConfig, ["algorithm.adv_estimator=rloo_vectorized", "algorithm.rollout_correction.rollout_is=none"]
    )
    assert loaded.config == load_config(PPOConfig, ["algorithm.adv_estimator=rloo"]).config
    assert "algorithm.adv_estimator=rloo_vectorized is now rloo" in loaded.notes and len(loaded.notes) == 2
    old = load_config(PPOConfig, ["actor_rollout_ref.rollout.name=sglang_async"])
    assert old.config.actor_rollout_ref.rollout.name == "sglang" and len(old.notes) == 1
    assert status(PPOConfig, "algorithm.adv_estimator", "grpo_vectorized").value == "grpo"


def test_a_null_in_place_of_a_block_leaves_it_as_it_is() -> None:
    loaded = load_config(PPOConfig, ["algorithm.rollout_correction=null", "algorithm.filter_groups=null"])
    assert loaded.config == load_config(PPOConfig).config
    assert all(
        note.startswith("algorithm.{rollout_correction=null, filter_groups=null} have no effect: ")
        for note in loaded.notes
    )
    assert len(loaded.notes) == 1  # a reason that keys of a block share is said once
    assert (
        load_config(PPOConfig, ["algorithm.pf_ppo.weight_pow=3", "~algorithm.pf_ppo"]).config
        == load_config(PPOConfig).config
    )


@pytest.mark.parametrize("name", ["dapo", "gdpo", "prime", "naive"])
def test_one_reward_manager_does_the_work_of_verls(name: str) -> None:
    loaded = load_config(
        PPOConfig,
        [f"reward_model.reward_manager={name}", "reward_model.reward_kwargs.overlong_buffer_cfg.log=True"],
    )
    assert loaded.config == load_config(PPOConfig).config and "overlong_buffer_cfg" in loaded.notes[0]


def test_a_wrong_key_of_reward_kwargs_is_not_lost() -> None:
    with pytest.raises(
        ConfigError, match=r"did you mean reward\.reward_kwargs\.overlong_buffer_cfg\.penalty_factor"
    ):
        load_config(PPOConfig, ["reward_model.reward_kwargs.overlong_buffer_cfg.penalty_facto=1"])


@pytest.mark.parametrize("rules", [tables().ppo, tables().sft])
def test_true_never_passes_as_the_accepted_one_nor_false_as_zero(rules: tuple[Rule, ...]) -> None:
    for rule in rules:
        for value, number in ((True, 1), (False, 0)):
            given = rule.accepted or ()
            if any(each is value for each in given):
                continue
            # only the number may be accepted, never the truth value by way of it
            assert _ruled(rule, "a", value).kind == ("no effect" if rule.accepted is None else "refused")
            assert number in given or rule.accepted is None or _ruled(rule, "a", number).kind == "refused"


@pytest.mark.parametrize(("root", "override", "path", "value"), VERL["honoured"])
def test_what_a_user_of_verl_asks_for_is_done(root: str, override: str, path: str, value: Any) -> None:
    loaded = load_config(ROOTS[root], [override])
    assert get_value(loaded.config, path) == value and path in loaded.given
    name, _, given = override.partition("=")
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    now = path
    if shown != given.lower():
        now += f"={shown}"
    assert loaded.notes == [f"{name} is now {now}"]


def test_keys_of_older_scripts_that_change_nothing_stay() -> None:
    words = VERL["harmless"].split()
    loaded = load_config(PPOConfig, words)
    assert loaded.config == load_config(PPOConfig).config and not loaded.given
    said = " ".join(loaded.notes)
    assert all(word.partition("=")[0].rpartition(".")[2] in said for word in words)


def test_settings_of_the_queue_keep_their_names() -> None:
    loaded = load_config(PPOConfig, ["transfer_queue.backend.storage_backend=MooncakeStore"])
    assert loaded.config.trainer.transfer_queue == {"backend": {"storage_backend": "MooncakeStore"}}
    assert "is read only with trainer.row_store" in " ".join(find_notes(loaded.config, loaded.given))


def test_no_effect_prints_one_line_and_changes_nothing() -> None:
    loaded = load_config(
        PPOConfig, ["actor_rollout_ref.model.use_remove_padding=True", "trainer.use_legacy_worker_impl=auto"]
    )
    assert loaded.config == load_config(PPOConfig).config and not loaded.given
    assert loaded.notes[0].startswith(
        "actor_rollout_ref.model.use_remove_padding=true has no effect: sequences are always packed"
    )
    assert len(loaded.notes) == 2


def test_a_command_that_compiles_decoding_runs_and_says_that_this_does_nothing() -> None:
    loaded = load_config(PPOConfig, ["actor_rollout_ref.rollout.enable_torch_compile=true"])
    assert loaded.config == load_config(PPOConfig).config
    (note,) = loaded.notes
    assert note.startswith("actor_rollout_ref.rollout.enable_torch_compile=true has no effect: ")


def test_status_depends_on_the_value() -> None:
    path = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
    assert [status(PPOConfig, path, value).kind for value in (False, None, "a.B")] == [
        "no effect",
        "no effect",
        "refused",
    ]
    assert status(PPOConfig, "no.such.key", 1).kind == "unknown"


def test_verls_prometheus_is_the_runs() -> None:
    verls = "actor_rollout_ref.rollout.prometheus"
    loaded = load_config(PPOConfig, [f"{verls}.enable=true", f"{verls}.port=9090", f"{verls}.file=p.yml"])
    assert loaded.config.trainer.prometheus == PrometheusConfig(enable=True, file="p.yml", reload_port=9090)


@pytest.mark.parametrize(
    ("root", "aliases"), [(PPOConfig, tables().ppo_aliases), (SFTConfig, tables().sft_aliases)]
)
def test_no_alias_hides_a_key_of_the_schema(root: type, aliases: Mapping[str, str]) -> None:
    for pattern in aliases:
        hidden = [path for path in keys_of(root) if re.fullmatch(pattern, path)]
        assert not hidden, pattern


@pytest.mark.parametrize("rules", [tables().ppo, tables().sft])
def test_every_rule_says_why_and_the_way_out(rules: tuple[Any, ...]) -> None:
    for rule in rules:
        assert rule.why or rule.accepted == (), rule.pattern
        assert (rule.accepted is None) != bool(rule.refusal), rule.pattern
    assert all(path in BOTH for path in tables().refused_values)


def test_other_values_stand_for_keys_of_the_schema() -> None:
    for path, values in tables().value_aliases.items():
        root = PPOConfig if path in keys_of(PPOConfig) else SFTConfig
        assert path in BOTH and all(status(root, path, value).kind == "alias" for value in values), path


def test_attention_of_the_model_is_ours() -> None:
    notes = load_config(
        PPOConfig, ["+actor_rollout_ref.model.override_config.attn_implementation=eager"]
    ).notes
    assert len(notes) == 1 and "one attention" in notes[0]
    rope = load_config(PPOConfig, ["+actor_rollout_ref.model.override_config.rope_scaling.factor=2"]).config
    assert rope.actor_rollout_ref.model.override_config == {"rope_scaling": {"factor": 2}}


def test_the_learning_rate_of_a_megatron_script_is_that_of_ours() -> None:
    wanted = ["lr_decay_style=cosine", "lr_decay_steps=40"]
    for block in ("actor_rollout_ref.actor.optim", "critic.optim"):
        config = load_config(PPOConfig, [f"{block}.{word}" for word in wanted]).config
        optim = get_value(config, block)
        assert (optim.lr_scheduler_type, optim.total_training_steps) == ("cosine", 40)
    optim = load_config(SFTConfig, [f"optim.{word}" for word in wanted]).config.optim
    assert (optim.lr_scheduler_type, optim.total_training_steps) == ("cosine", 40)


def test_a_reason_that_many_keys_share_is_said_once() -> None:
    keys = [f"{role}.megatron.{name}=true" for role in ("actor", "ref", "critic") for name in ("a", "b", "c")]
    with pytest.raises(ConfigError) as error:
        load_config(PPOConfig, keys)
    assert str(error.value).count("this setting of Megatron-LM has no counterpart here") == 1
    assert all(each in str(error.value) for each in keys)


def test_keys_of_other_optimizers() -> None:
    block = "actor_rollout_ref.actor.optim"
    given = {
        "optimizer": "muon",
        "override_optimizer_config.ns_steps": 7,
        "override_optimizer_config.adjust_lr_fn": "original",
        "override_optimizer_config.momentum": 0.9,
        "lr_decay_style": "WSD",
        "lr_wsd_decay_steps": 3,
        "lr_wsd_decay_style": "minus_sqrt",
        "optimizer_impl": "torchao.optim",
    }
    loaded = load_config(PPOConfig, [f"+{block}.{name}={value}" for name, value in given.items()])
    optim = loaded.config.actor_rollout_ref.actor.optim
    assert (optim.optimizer, optim.muon_ns_steps, optim.muon_adjust_lr) == ("Muon", 7, "original")
    assert (optim.momentum, optim.lr_scheduler_type, optim.lr_wsd_decay_steps) == (0.9, "wsd", 3)
