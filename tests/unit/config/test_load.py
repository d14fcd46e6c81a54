"""Recipes and command lines become configurations: grammar, aliases, interpolation, composition, sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.load import expand_sweeps, load_config, prepare_config
from hybridflow.config.preference import DPOConfig, RewardModelConfig
from hybridflow.config.recipes import FOLDER, find_recipe, recipe_names
from hybridflow.config.resolve import resolve
from hybridflow.config.show import to_yaml
from hybridflow.config.tree import flatten, get_value, keys_of
from hybridflow.errors import ConfigError


def load(*overrides: str, recipe: str | Path | None = None) -> PPOConfig:
    return load_config(PPOConfig, overrides, recipe).config


def problem(*overrides: str, recipe: str | Path | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(PPOConfig, overrides, recipe)
    return str(error.value)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("data.seed=3", "data.seed", 3),
        ("+data.seed=3", "data.seed", 3),
        ("++data.seed=3", "data.seed", 3),
        ("actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.optim.lr", 1e-6),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ["a.parquet", "b.parquet"]),
        ("data.train_files='a, b.parquet'", "data.train_files", "a, b.parquet"),
        ("data.train_files=~/a.parquet", "data.train_files", "~/a.parquet"),
        ("trainer.default_local_dir=runs/lr=3", "trainer.default_local_dir", "runs/lr=3"),
        ("data.task.options={hops: 3, deep: {a: [1]}}", "data.task.options", {"hops": 3, "deep": {"a": [1]}}),
        ("+data.task.options.hops=3", "data.task.options", {"hops": 3}),
        ("trainer.logger=['console','wandb']", "trainer.logger", ["console", "wandb"]),
        ("actor_rollout_ref.actor.grad_clip=null", "actor_rollout_ref.actor.grad_clip", None),
        ("data.val_files=", "data.val_files", ""),
        ("data.train_files=hdfs://host/a.parquet", "data.train_files", "hdfs://host/a.parquet"),
        ("algorithm={gamma: 0.9}", "algorithm.gamma", 0.9),
        (
            "trainer.experiment_name=${data.seed}_${trainer.project_name}",
            "trainer.experiment_name",
            "None_hybridflow",
        ),
        ("trainer.experiment_name=${oc.env:LOAD_TEST}", "trainer.experiment_name", "from the environment"),
        ("data.max_response_length=${data.max_prompt_length}", "data.max_response_length", 512),
    ],
)
def test_grammar(override: str, path: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_TEST", "from the environment")
    assert get_value(load(override), path) == value


FREE = "data.apply_chat_template_kwargs"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m.content }}, {% endfor %}"


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("[[a, 1, 2], [b, 2, 3]]", [["a", 1, 2], ["b", 2, 3]]),
        ('["x", "y"]', ["x", "y"]),
        ("{a: 5, b: {c: [d]}}", {"a": 5, "b": {"c": ["d"]}}),
        # JSON, and Python's form of it: Hydra takes no key in quotes
        ('{"a": 5}', {"a": 5}),
        ("{'a': None, 'b': True}", {"a": None, "b": True}),
        ('{"a": {"b c": [1, "d"]}, "e": null, "f": 1e-6}', {"a": {"b c": [1, "d"]}, "e": None, "f": 1e-6}),
        ('[{"a": 1}, {"b": "x:y, z"}]', [{"a": 1}, {"b": "x:y, z"}]),
        # signs inside a value
        ("a=b", "a=b"),
        ("a:b", "a:b"),
        ("a==b:c d", "a==b:c d"),
        ("my run", "my run"),
        ("https://x.y/z?q=1&r=2", "https://x.y/z?q=1&r=2"),
        ("'a, b'", "a, b"),
        ('"it\'s"', "it's"),
        ("C:\\dir", "C:\\dir"),
        ("a#b", "a#b"),
        ("é", "é"),
        ("", ""),
        ("''", ""),
        ("null", None),
        ("-1", -1),
        (".5", 0.5),
        # chat templates
        ("{% if x %}", "{% if x %}"),
        ("'{% if x %}'", "{% if x %}"),
        (TEMPLATE, TEMPLATE),
        ("{{ messages }}", "{{ messages }}"),
    ],
)
def test_values_as_people_write_them(written: str, value: object) -> None:
    for sign in ("", "+", "++"):
        assert load(f"{sign}{FREE}.k={written}").data.apply_chat_template_kwargs == {"k": value}


def test_a_block_in_json_sets_its_keys() -> None:
    config = load('data={"seed": 3, "train_files": ["a=1.parquet"]}', 'reward.terms=[{"name": "gsm8k"}]')
    assert config.data.seed == 3 and config.data.train_files == ["a=1.parquet"]
    assert config.reward.terms == [{"name": "gsm8k"}]
    assert "unknown key data.sed; did you mean data.seed" in problem('data={"sed": 3}')


def test_interpolation_in_defaults_follows_overrides() -> None:
    assert (
        load("trainer.project_name=p", "trainer.experiment_name=e").trainer.default_local_dir
        == "checkpoints/p/e"
    )


def test_the_last_override_wins_and_a_tilde_restores_the_default() -> None:
    assert load("data.seed=1", "data.seed=2").data.seed == 2
    loaded = load_config(PPOConfig, ["data.seed=1", "~data.seed"])
    assert loaded.config.data.seed is None and not loaded.given


def test_given_paths_are_those_of_recipe_and_command_line() -> None:
    loaded = load_config(PPOConfig, ["reward_model.reward_fn.path=r.py", "data.task.options={a: 1}"], "grpo")
    assert {
        "reward.custom_reward_function.path",
        "data.task.options.a",
        "actor_rollout_ref.rollout.n",
    } <= loaded.given


@pytest.mark.parametrize(
    ("old", "new", "value"),
    [
        ("reward_model.reward_fn.name", "reward.custom_reward_function.name", "f"),
        ("custom_reward_function.path", "reward.custom_reward_function.path", "f.py"),
        ("custom_reward_function.reward_kwargs.a", "reward.custom_reward_function.reward_kwargs.a", "1"),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
            "4",
        ),
        ("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu", "4"),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
            "4",
        ),
        (
            "actor_rollout_ref.actor.optim.warmup_style",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "cosine",
        ),
        (
            "actor_rollout_ref.actor.optim.lr_scheduler",
            "actor_rollout_ref.actor.optim.lr_scheduler_type",
            "cosine",
        ),
        ("critic.optim.warmup_steps_proportion", "critic.optim.lr_warmup_steps_ratio", "0.1"),
        ("rollout.temperature", "actor_rollout_ref.rollout.temperature", "0.7"),
        ("actor.checkpoint.contents", "actor_rollout_ref.actor.checkpoint.save_contents", "[model]"),
        ("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep", "3"),
        ("actor_rollout_ref.rollout.response_length", "data.max_response_length", "64"),
        ("actor.tau_pos", "actor_rollout_ref.actor.policy_loss.tau_pos", "2.0"),
        ("algorithm.rollout_is", "algorithm.rollout_correction.rollout_is", "token"),
        ("algorithm.rollout_rs_threshold", "algorithm.rollout_correction.rollout_rs_threshold", "0.5_2.0"),
        ("reward_model.overlong_buffer.len", "reward.reward_kwargs.overlong_buffer_cfg.len", "64"),
        ("distillation.teacher_model.model_path", "distillation.teacher_model.path", "org/teacher"),
    ],
)
def test_aliases_print_one_line_with_the_key_now_used(old: str, new: str, value: str) -> None:
    loaded, direct = load_config(PPOConfig, [f"{old}={value}"]), load_config(PPOConfig, [f"{new}={value}"])
    assert loaded.notes == [f"{old} is now {new}"] and not direct.notes
    assert loaded.config == direct.config != PPOConfig()


def test_sft_aliases() -> None:
    loaded = load_config(SFTConfig, ["optim.warmup_steps_proportion=0.1", "optim.lr_scheduler=cosine"])
    assert loaded.config.optim.lr_warmup_steps_ratio == 0.1
    assert loaded.config.optim.lr_scheduler_type == "cosine"
    assert len(loaded.notes) == 2


def test_null_in_an_old_key_does_not_undo_the_new_one() -> None:
    overrides = ["critic.ppo_micro_batch_size_per_gpu=2", "critic.ppo_micro_batch_size=null"]
    assert load(*overrides).critic.ppo_micro_batch_size_per_gpu == 2


def test_all_mistakes_of_a_command_line_at_once() -> None:
    message = problem("data.seed=x", "data.sed=1", "actor_rollout_ref.rollout.name=trtllm", "a")
    assert message.startswith("4 problems") and message.count("\n") == 4


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig, DPOConfig, RewardModelConfig])
def test_a_recipe_of_another_command_is_named_as_one(root: type[PPOConfig]) -> None:
    commands = {"grpo": PPOConfig, "tiny/sft": SFTConfig, "dpo": DPOConfig, "reward_model": RewardModelConfig}
    for recipe, own in commands.items():
        if own is root:
            load_config(root, [], recipe)
            continue
        with pytest.raises(ConfigError, match=f"recipe {recipe} is for `hybridflow .*others: use"):
            load_config(root, [], recipe)
    with pytest.raises(ConfigError, match="recipe dpo is for `hybridflow dpo`"):
        load_config(PPOConfig, [], "dpo")


def test_recipes_build_on_each_other(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "data: {train_batch_size: 8, seed: 1}\nactor_rollout_ref: {actor: {optim: {lr: 1e-3}}}\n"
    )
    (tmp_path / "run.yaml").write_text(
        "defaults: [grpo, base]\ndata: {seed: 2}\ntrainer: {experiment_name: 's${data.seed}'}\n"
    )
    config = load("data.max_prompt_length=9", recipe=tmp_path / "run.yaml")
    assert (config.data.train_batch_size, config.data.seed, config.data.max_prompt_length) == (8, 2, 9)
    assert config.actor_rollout_ref.actor.optim.lr == 1e-3 and config.actor_rollout_ref.rollout.n == 8
    assert config.trainer.experiment_name == "s2"
    (tmp_path / "last.yaml").write_text("defaults: [_self_, base]\ndata: {seed: 2}\n")
    assert load(recipe=tmp_path / "last.yaml").data.seed == 1


def test_recipes_in_folders(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "mine.yaml").write_text("data: {seed: 1, train_batch_size: 9}\n")
    (tmp_path / "tiny" / "base.yaml").write_text("data: {train_batch_size: 8}\n")
    (tmp_path / "tiny" / "mine.yaml").write_text("defaults: [base, ../mine, ../grpo]\ndata: {seed: 2}\n")
    (tmp_path / "user.yaml").write_text("defaults: [tiny/mine]\n")
    (tmp_path / "grpo.yaml").write_text("algorithm: {adv_estimator: rloo}\n")
    config = load(recipe=tmp_path / "user.yaml")
    assert (config.data.seed, config.data.train_batch_size, config.algorithm.adv_estimator) == (2, 9, "rloo")


def test_names_of_recipes_are_found(tmp_path: Path) -> None:
    assert {"ppo", "grpo"} <= set(recipe_names())
    for name in recipe_names():
        assert find_recipe(name) == FOLDER / f"{name}.yaml"
        assert find_recipe(name, beside=tmp_path) == FOLDER / f"{name}.yaml"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5_5", "0.5_5"),
        ("1_2", "1_2"),
        ("0.5_2.0", "0.5_2.0"),
        ("0.2", 0.2),
        ("2", 2.0),
        ("'0.5_5'", "0.5_5"),
    ],
)
def test_two_bounds_are_not_read_as_one_number(text: str, value: object, tmp_path: Path) -> None:
    key = "algorithm.rollout_correction.rollout_is_threshold"
    assert get_value(load(f"{key}={text}"), key) == value
    assert (
        get_value(
            load(f"algorithm.rollout_correction={{rollout_is_threshold: {text}, rollout_is: token}}"), key
        )
        == value
    )
    for recipe in (
        "algorithm:\n  rollout_correction:\n    rollout_is_threshold: {} # both\n",
        "algorithm.rollout_is_threshold: {}\n",
    ):
        (tmp_path / "run.yaml").write_text(recipe.format(text))
        assert get_value(load(recipe=tmp_path / "run.yaml"), key) == value
    (tmp_path / "flow.yaml").write_text(
        f"algorithm: {{rollout_correction: {{rollout_is_threshold: {text}, rollout_is: token}}}}\n"
    )
    assert get_value(load(recipe=tmp_path / "flow.yaml"), key) == value
    assert [get_value(load(*run), key) for run in expand_sweeps([f"{key}={text},7"])] == [value, 7.0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("defaults: [self]\n", "circle"),
        ("defaults: {a: 1}\n", "list of recipe names"),
        ("defaults: [nothing_like_it]\n", "no recipe is called nothing_like_it"),
        ("- a\n", "wanted a block of keys"),
        ("a: [\n", "cannot be read as YAML"),
        ("data: {sed: 1}\n", "unknown key data.sed; did you mean data.seed"),
    ],
)
def test_bad_recipes(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "self.yaml").write_text(text)
    assert says in problem(recipe=tmp_path / "self.yaml")


def test_a_recipe_that_is_not_there() -> None:
    assert "did you mean grpo?" in problem(recipe="grp")
    assert "there is no file" in problem(recipe="no/such.yaml")


@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_recipes_repeat_no_default(name: str) -> None:
    tree = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for path, value in flatten(tree):
        assert keys_of(PPOConfig)[path].default != value, path
    assert name in recipe_names()


def test_sweeps_expand_in_order() -> None:
    runs = expand_sweeps(["a=1,2", "+b=choice(x,y)", "c=[1,2]", "d=range(0,2)"])
    assert len(runs) == 8
    assert runs[0] == ["a=1", "+b=x", "c=[1,2]", "d=0"] and runs[1] == ["a=1", "+b=x", "c=[1,2]", "d=1"]
    assert runs[-1] == ["a=2", "+b=y", "c=[1,2]", "d=1"]
    assert expand_sweeps(["a=1"]) == [["a=1"]]
    with pytest.raises(ConfigError, match="list the values"):
        expand_sweeps(["a=interval(0,1)"])


@pytest.mark.parametrize("root", [PPOConfig, SFTConfig])
def test_yaml_that_is_shown_loads_to_the_same(root: type, tmp_path: Path) -> None:
    config, _ = resolve(load_config(root, ["trainer.total_epochs=7", "trainer.project_name='a b: c'"]).config)
    (tmp_path / "all.yaml").write_text(to_yaml(config))
    assert load_config(root, [], tmp_path / "all.yaml").config == config
    assert yaml.safe_load(to_yaml(config, only_changed=True)) == {
        "trainer": {"total_epochs": 7, "project_name": "a b: c"}
        | ({"default_local_dir": "checkpoints/a b: c/run"})
    }


def test_prepared_runs_are_resolved_and_checked(tmp_path: Path) -> None:
    overrides = [
        "data.task.name=arithmetic_chain",
        "actor_rollout_ref.model.path=org/name",
        f"trainer.default_local_dir={tmp_path}",
    ]
    prepared = prepare_config(PPOConfig, [*overrides, "data.train_batch_size=64"], "grpo")
    assert prepared.config.actor_rollout_ref.actor.ppo_mini_batch_size == 64
    assert any("ppo_mini_batch_size=64" in note for note in prepared.notes)
    assert prepared.config.critic.enable is False


@pytest.mark.parametrize(
    "overrides",
    [
        ("actor_rollout_ref.actor.strategy=veomni", "actor_rollout_ref.actor.strategy=fsdp2"),
        ("actor.strategy=veomni", "actor_rollout_ref.actor.strategy=fsdp2"),
        ("trainer.npu_profile.options.level=1", "trainer.npu_profile.options.level=null"),
        ("actor_rollout_ref.actor.strategy=veomni", "~actor_rollout_ref.actor.strategy"),
        ("actor_rollout_ref.actor.strategy=veomni", "~actor_rollout_ref.actor"),
    ],
)
def test_a_refused_value_that_is_replaced_later_is_not_judged(overrides: tuple[str, str]) -> None:
    assert load(*overrides).actor_rollout_ref.actor.strategy == PPOConfig().actor_rollout_ref.actor.strategy
    if "~" not in overrides[1]:
        assert overrides[0] in problem(*reversed(overrides))


def test_a_refused_value_of_a_file_is_replaced_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("actor_rollout_ref: {actor: {strategy: veomni}}")
    assert "strategy=veomni" in problem(recipe=file)
    load("actor_rollout_ref.actor.strategy=fsdp2", recipe=file)


def test_two_names_of_a_key_with_different_values_are_not_lost_silently() -> None:
    old = ("trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=3")
    loaded = load_config(PPOConfig, old)
    assert loaded.config.trainer.max_ckpt_to_keep == 3
    (note,) = (note for note in loaded.notes if "both set" in note)
    assert note == (f"{old[0]} and {old[1]} both set trainer.max_ckpt_to_keep: the last one counts, 3")
    same = load_config(PPOConfig, [old[0], "trainer.max_critic_ckpt_to_keep=2"])
    assert not any("both set" in note for note in same.notes)
    left_open = load_config(PPOConfig, [old[0], "trainer.max_critic_ckpt_to_keep=null"])
    assert left_open.config.trainer.max_ckpt_to_keep == 2
    assert not any("both set" in note for note in left_open.notes)


def test_a_key_that_is_deleted_and_set_again_counts_as_given() -> None:
    assert "data.seed" in load_config(PPOConfig, ["~data.seed", "data.seed=3"]).given
