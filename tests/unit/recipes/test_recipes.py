"""Each recipe says only what differs, passes every check, and has a twin on the tiny task."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from hybridflow.config import DPOConfig, PPOConfig, RewardModelConfig, SFTConfig
from hybridflow.config.agent import MultiTurnConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.config.needs import uses_agents
from hybridflow.config.recipes import COMPARISONS, FOLDER
from hybridflow.config.tree import flatten, keys_of
from hybridflow.data.tasks.arithmetic_chain import STEP_END
from hybridflow.errors import ConfigError
from hybridflow.tools.toolset import Toolset

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem not in COMPARISONS)
ENVIRONMENTS = ["calculator", "guess", "search"]
OTHERS = [
    "base",
    "sft",
    "agent_base",
    "agent_sft",
    "code",
    "code_sft",
    "judge",
    "judge_sft",
    "ppo_reward_model",
    "ppo_process_reward",
    "vlm",
    "vlm_sft",
    *ENVIRONMENTS,
]
TINY = sorted(
    path.stem for path in (FOLDER / "tiny").glob("*.yaml") if path.stem not in (*OTHERS, *COMPARISONS)
)
AGENTS = {"collabllm", "gsm8k_tools", "retool", "search_r1"}
"""Recipes with tools or users, whose tiny tasks are others."""
PICTURES = {"geo3k"}
"""Recipes whose rows have pictures; they are GRPO's, on data of their own."""
TWINNED = [name for name in NAMES if name not in AGENTS | PICTURES]
ON_A_MODEL_OF_ITS_OWN = {"moe"}
"""Tiny recipes of an algorithm that has a recipe, on another kind of model."""
TEACHER = {"on_policy_distillation"}


def prepared(recipe: str, folder: Path, *overrides: str) -> PPOConfig:
    # a hub name: it is not looked up
    model = "owner/model"
    teacher = [f"distillation.teacher_model.path={model}"] if recipe.removeprefix("tiny/") in TEACHER else []
    keys = [
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={folder}",
        *teacher,
        *overrides,
    ]
    return prepare_config(PPOConfig, keys, recipe=recipe).config


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_runs_on_a_users_data(name: str, tmp_path: Path) -> None:
    key = "actor_rollout_ref.rollout.agent.options.interaction_config_path"
    user = f"{key}={EXAMPLES}/agents/collabllm_user.yaml"
    own = [user] if name == "collabllm" else []  # which says so: its agent cannot be made without
    config = prepared(name, tmp_path, "data.task.name=arithmetic_chain", *own)
    assert config.trainer.total_training_steps is None, "nothing of the tiny task is in it"
    assert config.trainer.num_threads is None, "nothing of the tiny task is in it"


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_a_recipe_of_agents_says_what_it_takes_and_runs_with_its_files(name: str, tmp_path: Path) -> None:
    """The command in the header is one that the checks accept, with files that are there."""
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    (command,) = re.findall(r"^# (hybridflow train (?:.*\\\n)*.*)$", text, re.MULTILINE)
    keys = [word for word in command.split() if "=" in word and not word.startswith("data.train_files")]
    keys = [key.replace("examples/", f"{EXAMPLES}/") for key in keys]
    config = prepared(name, tmp_path, *keys, "data.task.name=arithmetic_chain")
    assert uses_agents(config) and "GiB" in text
    tools = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    for script in re.findall(r"examples/data_preprocess/\w+\.py", text):
        assert (EXAMPLES.parent / script).is_file()
    if tools is not None:
        assert len(Toolset.load(MultiTurnConfig(tool_config_path=tools)).specs) == 1


def test_files_of_tools_beside_the_recipes_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"contents": "Rome\\nis old"}')
    monkeypatch.setenv("CORPUS", str(tmp_path / "corpus.jsonl"))
    names = {
        path.name: list(Toolset.load(MultiTurnConfig(tool_config_path=str(path))).specs)
        for path in sorted((EXAMPLES / "agents").glob("*_tools.yaml"))
        if path.stem != "python_tools"
    }
    assert names == {
        "gsm8k_tools.yaml": ["calc_gsm8k_reward"],
        "local_search_tools.yaml": ["search"],
        "retool_tools.yaml": ["code_interpreter"],
        "search_tools.yaml": ["search"],
    }


def test_the_file_of_the_python_tool_loads_where_its_sandbox_does() -> None:
    try:
        tools = Toolset.load(MultiTurnConfig(tool_config_path=str(EXAMPLES / "agents" / "python_tools.yaml")))
    except ConfigError as error:
        pytest.skip(f"layers are missing here: {error}")
    assert list(tools.specs) == ["code_interpreter"]


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_recipe_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    config = prepared(f"tiny/{name}", tmp_path)
    rollout = config.actor_rollout_ref.rollout
    assert config.data.train_batch_size * rollout.n == 512 and config.data.max_response_length == 48
    assert config.trainer.experiment_name == name and config.trainer.num_threads == 1
    assert not config.actor_rollout_ref.model.enable_gradient_checkpointing


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_recipe_of_an_environment_runs_as_it_stands(name: str, tmp_path: Path) -> None:
    config = prepared(f"tiny/{name}", tmp_path)
    assert config.data.environment == name and config.data.task.name == f"environment:{name}"


def test_recipes_of_learned_rewards_run_with_a_model_for_them(tmp_path: Path) -> None:
    judged = prepared("tiny/judge", tmp_path)
    assert [term["name"] for term in judged.reward.terms] == ["judge", "arithmetic_chain"]
    learned = prepared("tiny/ppo_reward_model", tmp_path, "reward.reward_model.model.path=owner/judge")
    assert learned.reward.reward_model.enable and learned.algorithm.adv_estimator == "gae"
    steps = prepared("tiny/ppo_process_reward", tmp_path, "reward.reward_model.model.path=owner/judge")
    assert steps.reward.reward_model.kind == "token_score" and steps.reward.terms == learned.reward.terms
    assert steps.reward.reward_model.step_separator == STEP_END, "steps end where those that were learned do"


def test_each_recipe_has_its_twin() -> None:
    assert sorted(set(TINY) - ON_A_MODEL_OF_ITS_OWN) == TWINNED


@pytest.mark.parametrize("name", TWINNED)
def test_a_twin_keeps_the_algorithm(name: str, tmp_path: Path) -> None:
    """What decides which maths runs is the same in both: estimator, loss, filters, correction."""
    whole, tiny = (
        prepared(name, tmp_path, "data.task.name=arithmetic_chain"),
        prepared(f"tiny/{name}", tmp_path),
    )
    for config in (whole, tiny):
        assert config.critic.enable is (name in ("ppo", "pf_ppo", "vapo"))
    a, b = whole.algorithm, tiny.algorithm
    assert a.adv_estimator == b.adv_estimator and a.rollout_correction == b.rollout_correction
    assert a.filter_groups.enable == b.filter_groups.enable and a.use_pf_ppo == b.use_pf_ppo
    one, other = whole.actor_rollout_ref.actor, tiny.actor_rollout_ref.actor
    assert one.policy_loss == other.policy_loss and one.loss_agg_mode == other.loss_agg_mode


@pytest.mark.parametrize("name", ["dpo", "reward_model", *(f"tiny/{name}" for name in COMPARISONS)])
def test_a_recipe_of_comparisons_passes_every_check(name: str, tmp_path: Path) -> None:
    keys = ["model.path=owner/model", f"trainer.default_local_dir={tmp_path}"]
    if "/" not in name:
        keys.append("data.task.name=arithmetic_preferences")
    config = prepare_config(root_of(name), keys, recipe=name).config
    assert config.data.max_length > 0


def root_of(name: str) -> type[PPOConfig] | type[SFTConfig]:
    stem = name.rpartition("/")[2]
    if stem in COMPARISONS:
        return DPOConfig if stem == "dpo" else RewardModelConfig
    return SFTConfig if name.endswith("sft") else PPOConfig


@pytest.mark.parametrize(
    "name", [*NAMES, "dpo", "reward_model", *(f"tiny/{name}" for name in (*TINY, *OTHERS, *COMPARISONS))]
)
def test_a_recipe_says_what_it_is_and_repeats_no_default(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    root = root_of(name)
    if "/" not in name and name not in PICTURES:
        assert re.search(r"^# .*arXiv \d{4}\.\d{5}", text), "the header names the paper"
    if not name.endswith("base"):
        assert re.search(
            rf"^# hybridflow (train|sft|dpo|reward-model) --recipe {name} ", text, re.MULTILINE
        ), "the header has the command"
    own = yaml.safe_load(text)
    parents = own.pop("defaults", [])
    if parents:
        return  # a value may be a default that undoes a parent's
    for path, value in flatten(own):
        assert path not in keys_of(root) or keys_of(root)[path].default != value, path


def test_papers_bounds_reach_the_loss(tmp_path: Path) -> None:
    gspo = prepared("gspo", tmp_path, "data.task.name=arithmetic_chain").actor_rollout_ref.actor
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert load_config(PPOConfig, [], recipe="dppo_kl").config.actor_rollout_ref.actor.clip_ratio_c == 20.0


@pytest.mark.parametrize("loss", ["dppo_tv", "dppo_kl"])
def test_dppo_has_its_papers_largest_ratio_without_its_recipe_too(loss: str) -> None:
    key = "actor_rollout_ref.actor"
    base = ["actor_rollout_ref.model.path=some/model", "data.task.name=arithmetic_chain"]
    mode = f"{key}.policy_loss.loss_mode={loss}"
    config, notes, _ = prepare_config(PPOConfig, [*base, mode])
    assert config.actor_rollout_ref.actor.clip_ratio_c == 20.0
    assert any("clip_ratio_c=20.0" in note for note in notes)
    own = prepare_config(PPOConfig, [*base, mode, f"{key}.clip_ratio_c=5"]).config
    assert own.actor_rollout_ref.actor.clip_ratio_c == 5.0
    assert prepare_config(PPOConfig, base).config.actor_rollout_ref.actor.clip_ratio_c == 3.0


@pytest.mark.parametrize(("longest", "buffer"), [(5120, 1024), (512, 102), (3, 1)])
def test_dapos_overlong_buffer_is_a_fifth_of_the_longest_response(longest: int, buffer: int) -> None:
    keys = ["actor_rollout_ref.model.path=some/model", "data.task.name=arithmetic_chain"]
    keys.append(f"data.max_response_length={longest}")
    config = prepare_config(PPOConfig, keys, recipe="dapo").config
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == buffer
