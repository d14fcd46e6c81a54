"""Untyped trees become typed configurations, or one error that lists every mistake."""

from __future__ import annotations

import pytest

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.convert import convert, suggest
from hybridflow.config.tree import flatten, get_value, keys_of, to_tree, type_name, with_values
from hybridflow.errors import ConfigError


def build(**tree: object) -> PPOConfig:
    return convert(PPOConfig, tree)


def problems(**tree: object) -> str:
    with pytest.raises(ConfigError) as error:
        convert(PPOConfig, tree)
    return str(error.value)


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_tree_and_back(root: type) -> None:
    config = root()
    assert convert(root, to_tree(config)) == config
    assert convert(root, {}) == config


def test_blocks_keep_their_own_defaults() -> None:
    assert build(critic={"optim": {"eps": 1e-6}}).critic.optim.lr == 1e-5
    assert (
        build(actor_rollout_ref={"actor": {"optim": {"eps": 1e-6}}}).actor_rollout_ref.actor.optim.lr == 1e-6
    )


def test_numbers() -> None:
    config = build(algorithm={"gamma": 1, "lam": "9.5e-1"}, trainer={"experiment_name": 7})
    assert config.algorithm.gamma == 1.0 and type(config.algorithm.gamma) is float
    assert config.algorithm.lam == 0.95
    assert config.trainer.experiment_name == "7"


@pytest.mark.parametrize("value", ["a.parquet", ["a.parquet", "b.parquet"]])
def test_a_string_or_a_list_stays_what_it_is(value: object) -> None:
    assert build(data={"train_files": value}).data.train_files == value


def test_null_and_free_blocks() -> None:
    config = build(data={"val_batch_size": None, "task": {"options": {"hops": 3, "deep": {"a": 1}}}})
    assert config.data.val_batch_size is None
    assert config.data.task.options == {"hops": 3, "deep": {"a": 1}}


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("data.seed", "x", "int or null"),
        ("data.seed", True, "int or null"),
        ("data.shuffle", 1, "bool"),
        ("data.train_batch_size", 0, "int ≥ 1"),
        ("data.train_batch_size", 2.0, "int ≥ 1"),
        ("data.truncation", "eror", "did you mean 'error'?"),
        ("data.train_files", {"a": 1}, "str or list of str"),
        ("data.custom_cls", "file.py", "a block of keys"),
        ("algorithm.gamma", 1.5, "≤ 1"),
        ("algorithm.gamma", "high", "float"),
        ("algorithm.gamma", float("nan"), "float"),
        ("algorithm.gamma", True, "float"),
        ("algorithm.kl_ctrl.target_kl", 0, "> 0"),
        ("actor_rollout_ref.model.path", ["a"], "str or null"),
        ("actor_rollout_ref.actor.optim.betas", "0.9", "list of float"),
        ("actor_rollout_ref.actor.optim.betas", ["x"], "list of float"),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["modle"], "did you mean 'model'?"),
        ("data.task.options", [1], "block of keys"),
    ],
)
def test_mismatches_say_where_what_and_wanted(key: str, value: object, wanted: str) -> None:
    tree: object = value
    for name in reversed(key.split(".")):
        tree = {name: tree}
    assert isinstance(tree, dict)
    message = problems(**tree)
    assert message.startswith(f"{key}: got ") and wanted in message, message


def test_all_mistakes_at_once() -> None:
    message = problems(data={"seed": "x", "trian_files": []}, trainer={"nnodes": 0}, extra=1)
    assert message.startswith("4 problems")
    for part in (
        "data.seed",
        "unknown key data.trian_files; did you mean data.train_files",
        "trainer.nnodes",
        "unknown key extra",
    ):
        assert part in message


def test_nearest_keys_by_whole_path_and_last_part() -> None:
    known = list(keys_of(PPOConfig))
    assert suggest("data.train_batchsize", known)[0] == "data.train_batch_size"
    assert suggest("trainer.learning_starts_at_noon", known) == []
    assert "actor_rollout_ref.rollout.gpu_memory_utilization" in suggest("gpu_memory_utilisation", known)
    assert len(suggest("ppo_mini_batch_size", known)) <= 3


def test_with_values_changes_only_what_is_named() -> None:
    config = with_values(PPOConfig(), {"critic.optim.lr": 1.0, "data.seed": 5})
    assert get_value(config, "critic.optim.lr") == 1.0 and config.data.seed == 5
    assert with_values(config, {"critic.optim.lr": 1e-5, "data.seed": None}) == PPOConfig()


def test_every_key_has_a_meaning_and_a_readable_type() -> None:
    for root in (PPOConfig, SFTConfig):
        for path, info in keys_of(root).items():
            assert info.meaning, path
            assert "[" not in type_name(info.type) and "typing" not in type_name(info.type), path


def test_flatten_stops_at_empty_blocks_and_odd_names() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": {1: 2}}) == [("a.b", 1), ("a.c", {}), ("d", {1: 2})]
