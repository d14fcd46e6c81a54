"""A user's own code is refused by its source, which is read and never run; what that leaves open is not."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from possible_run import problem

from hybridflow.config import PPOConfig
from hybridflow.config.load import prepare_config

LOSS = "actor_rollout_ref.actor.policy_loss"
ROLLOUT = "actor_rollout_ref.rollout"
NEVER_RUN = "raise SystemExit('this file was run')\n"


def keys_of(base: list[str], folder: Path, source: str, keys: str) -> list[str]:
    """Write the source as mine.py, and return the keys with its path in the place of MINE."""
    (folder / "mine.py").write_text(NEVER_RUN + textwrap.dedent(source))
    return [*base, *keys.replace("MINE", str(folder / "mine.py")).split(" ")]


LOSSES = f"{LOSS}.loss_mode=MINE:f"
ESTIMATORS = "algorithm.adv_estimator=MINE:f"
REWARDS = "reward.custom_reward_function.path=MINE"
ENVIRONMENTS = "data.environment=MINE:E"
AGENTS = f"{ROLLOUT}.agent.default_agent_loop=MINE:A"

REFUSED = [
    # a loss
    (
        LOSSES,
        "def f(log_prob, uid, scale): ...",
        "got f(log_prob, uid, scale), wanted def loss(&: there is no uid (did you mean group_ids?)",
    ),
    (
        LOSSES,
        "def f(logp, advantages): ...",
        "no logp (did you mean log_prob?); without log_prob its result has no",
    ),
    (LOSSES, "def f(log_prob, /, scale): ...", "log_prob cannot be given by name: leave out the /"),
    (
        LOSSES,
        "def f(log_prob, config): ...",
        "wanted def loss(log_prob, old_log_prob, advantages, response_mask, scale",
    ),
    (LOSSES, "def f(log_prob, reward_components): ...", "there is no reward_components"),
    (
        f"{LOSSES} algorithm.adv_estimator=grpo",
        "def f(log_prob, values): ...",
        "needs values, and the run has no critic: set critic.enable=true",
    ),
    (
        f"{LOSSES} {LOSS}.options={{widht:1}}",
        "def f(log_prob, *, width=2): ...",
        "has widht, which it does not take",
    ),
    (
        f"{LOSSES} {LOSS}.options={{scale:1}}",
        "def f(log_prob, **rest): ...",
        "options has scale, which it does not",
    ),
    (LOSSES, "def g(): ...", "mine.py has no name 'f'; it defines: g"),
    (LOSSES, "def f(log_prob:\n    ...", "mine.py failed: SyntaxError: "),
    # an estimator
    (ESTIMATORS, "def f(token_level_rewards, response_mask, uid): ...", "no uid (did you mean group_ids?)"),
    (
        ESTIMATORS,
        "async def f(rewards, eos_mask, index): ...",
        "no rewards (did you mean token_level_rewards?) and no",
    ),
    (ESTIMATORS, "def f(values): ...", "needs values, and the run has no critic: set critic.enable=true"),
    (ESTIMATORS, "def f(reward_components): ...", "set algorithm.gdpo_reward_keys"),
    (
        f"{ESTIMATORS} algorithm.options={{flor:1}}",
        "def f(loss_mask, floor=0): ...",
        "options has flor, which it does",
    ),
    # a reward function, by all keys that name one
    (
        REWARDS,
        "def compute_score(solution_str, answer): ...",
        "answer (did you mean ground_truth?)); name some of these",
    ),
    (
        REWARDS,
        "def compute_reward(solution_str, gold): ...",
        "got compute_reward(solution_str, g",
    ),
    (f"{REWARDS}:g", "async def g(a, b, c, d, e): ...", "g(a, b, c, d, e): it is called with data_source=, "),
    ("reward.function=MINE:f", "def f(solution_str, bonus): ...", "missing a required argument: 'bonus'"),
    (
        "reward.terms=[{name:'MINE:f',weigth:2}]",
        "def f(solution_str): ...",
        "unexpected keyword argument 'weigth'",
    ),
    (
        f"{REWARDS} reward.custom_reward_function.reward_kwargs={{completions:1}}",
        "def compute_score(completions, **columns): ...",
        "completions comes from the row; remove it from the options",
    ),
    (
        f"{REWARDS}:f reward.manager=batch",
        "def f(solution_str): ...",
        "it is called with data_sources=, solution_strs=",
    ),
    (
        "reward.manager=MINE:M",
        "class M:\n    def __init__(self): ...",
        "wanted __init__(self, reward_function)",
    ),
    # an environment
    (
        ENVIRONMENTS,
        "class E:\n    def reset(self): ...\n    def step(self, text): ...",
        "wanted def reset(self, row)",
    ),
    (
        ENVIRONMENTS,
        "class E:\n    def step(self, text): ...",
        "is no environment, wanted a class with the methods",
    ),
    (ENVIRONMENTS, "def E(): ...", "is no environment, wanted a class"),
    (
        f"{ENVIRONMENTS} data.environment_options={{hard:1}}",
        "from there import Base\nclass E(Base):\n    def __init__(self, easy): ...",
        "data.environment_options={'hard': 1} do not fit",
    ),
    (
        ENVIRONMENTS,
        "class B:\n    def reset(self, row): ...\nclass E(B):\n    def step(self): ...",
        "got E.step(self), wanted def step(self, text): too many positional arguments",
    ),
    # an agent
    (AGENTS, "def A(row): ...", "wanted def run(base_url, row)"),
    (
        AGENTS,
        "class A:\n    def run(self, episode, policy): ...",
        "is no class with `async def run(self, episode",
    ),
    (
        AGENTS,
        "class A:\n    async def run(self, episode): ...",
        "missing a required argument: 'tokenizer'|too many",
    ),
    (
        AGENTS,
        "class A(B):\n    async def run(self, a, b, c): ...",
        "or of a loop async def run(self, sampling_params",
    ),
    # tools
    (
        f"{ROLLOUT}.multi_turn.function_tool_path=MINE",
        "from hybridflow.tools import tool\n@tool\ndef f(a: int, b): ...\n@tool('g')\ndef g(*a): ...",
        "tool f, argument 'b': it has no type; write, for example, b: str&tool g, argument 'a': got the form",
    ),
    # data
    (
        "data.task.name=MINE:f data.train_files=[] data.val_files=[]",
        "def f(size): ...",
        "wanted def task(seed, **opt",
    ),
    (
        "data.custom_cls.path=MINE:D",
        "class D:\n    def __init__(self, a): ...",
        "wanted __init__(self, files, tok",
    ),
    (
        "data.sampler.class_path=MINE:S",
        "class S:\n    def __init__(self, a, b): ...",
        "has no __iter__, __len__, set_",
    ),
    ("trainer.step_class=MINE:f", "def f(): ...", "wanted a subclass of hybridflow.trainer.ppo.step.PPOStep"),
]
ACCEPTED = [
    (LOSSES, "def f(log_prob): ..."),
    (LOSSES, "def f(log_prob, advantages, ref_log_prob, clip_low, unheard_of=1): ..."),
    (LOSSES, "def f(a, b, *rest): ..."),
    (LOSSES, "def f(**rest): ..."),
    (f"{LOSSES} {LOSS}.options={{width:1}}", "def f(log_prob, width): ..."),
    (LOSSES, "import functools\ndef g(w): ...\nf = functools.partial(g, 1)"),
    (LOSSES, "from there import f"),
    (LOSSES, "from there import *"),
    (LOSSES, "import there\n@there.wrapped\ndef f(x, y): ..."),
    (LOSSES, "def f(x): ...\ndef f(y): ..."),
    (LOSSES, "if True:\n    def f(x): ..."),
    (LOSSES, "def make():\n    global f\n    def f(x): ..."),
    (LOSSES, "exec('f = print')"),
    (LOSSES, "def __getattr__(name): ..."),
    (LOSSES, "vars()['f'] = print"),
    (LOSSES, "from sys import modules\nsetattr(modules[__name__], 'f', print)"),
    (LOSSES, "import inspect\ninspect.currentframe().f_globals['f'] = print"),
    (LOSSES, "def f(x): ...\nf.__signature__ = 1"),
    (LOSSES, "def f(a, a): ..."),  # importing it says so
    (LOSSES, f"x = {' + '.join('1' * 9000)}\ndef f(x): ..."),
    (
        LOSSES,
        "from hybridflow.algorithms.policy_losses import register_policy_loss\n"
        "@register_policy_loss('mine', keeps_groups=True)\ndef f(log_prob, scale): ...",
    ),
    (f"{LOSSES} trainer.step_class=MINE:Step", "from there import Step\ndef f(log_prob, uid): ..."),
    (ESTIMATORS, "def f(token_level_rewards, response_mask, group_ids, *, gamma, floor=0.0): ..."),
    (f"{ESTIMATORS} critic.enable=true", "def f(values, process_rewards): ..."),
    (f"{ESTIMATORS} algorithm.options={{a:1}}", "def f(**rest): ..."),
    (REWARDS, "def compute_score(data_source, solution_str, ground_truth, extra_info=None): ..."),
    (REWARDS, "async def compute_reward(response, messages, response_ids, **rest): ..."),
    (REWARDS, "class compute_score:\n    def __init__(self, a, b, c, d): ..."),
    (REWARDS, "def compute_score(completions, prompts, my_column): ..."),
    (f"{REWARDS}:f reward.custom_reward_function.reward_kwargs={{k:1}}", "def f(solution_str, k): ..."),
    ("reward.terms=[{name:'MINE:f',weight:2,scale:3,when:format}]", "def f(solution_str, scale): ..."),
    (
        f"{REWARDS}:f reward.manager=batch",
        "def f(data_sources, solution_strs, ground_truths, extra_infos): ...",
    ),
    (ENVIRONMENTS, "class E(Base):\n    def reset(self, *rows): ..."),
    (ENVIRONMENTS, "class E(A, B): ..."),
    (ENVIRONMENTS, "class E:\n    reset = step = print"),
    (ENVIRONMENTS, "class E: ...\nE.reset = E.step = print"),
    (ENVIRONMENTS, "class E: ...\nfor name in ('reset', 'step'):\n    setattr(E, name, print)"),
    (ENVIRONMENTS, "class B:\n    def __init_subclass__(cls): cls.reset = cls.step = print\nclass E(B): ..."),
    (ENVIRONMENTS, "class E(metaclass=M): ..."),
    (
        f"{ENVIRONMENTS} data.environment_options={{a:1}}",
        "from dataclasses import dataclass\n@dataclass\nclass E:\n    a: int",
    ),
    (AGENTS, "class A(Loop):\n    async def run(self, sampling_params, **kwargs): ..."),
    (
        AGENTS,
        "class A:\n    def __init__(self, tokenizer): ...\n    async def run(self, episode, policy): ...",
    ),
    (
        f"{ROLLOUT}.multi_turn.function_tool_path=MINE",
        "from hybridflow.tools import tool\nfrom there import other\n@tool\ndef f(a: int): ...\n"
        "@tool(schema={})\ndef g(a): ...\n@other\n@tool\ndef h(a): ...\ndef i(a): ...",
    ),
    ("data.task.name=MINE:f data.train_files=[] data.val_files=[]", "def f(seed, size=1): ..."),
    (
        "data.custom_cls.path=MINE:D",
        "class D:\n    def __init__(self, files, tokenizer, config, processor=None): ...",
    ),
    (
        "data.sampler.class_path=MINE:S",
        "class S(Base):\n    def __init__(self, data_source, data_config): ...",
    ),
]


@pytest.mark.parametrize(("keys", "source", "says"), REFUSED)
def test_what_cannot_be_called_is_refused_unread(
    base: list[str], tmp_path: Path, keys: str, source: str, says: str
) -> None:
    message = problem(keys_of(base, tmp_path, source, keys))
    for part in says.split("&"):
        assert any(each in message for each in part.split("|")), message


@pytest.mark.parametrize(("keys", "source"), ACCEPTED)
def test_what_the_source_leaves_open_is_not_refused(
    base: list[str], tmp_path: Path, keys: str, source: str
) -> None:
    prepare_config(PPOConfig, keys_of(base, tmp_path, source, keys))


@pytest.mark.parametrize("packages", [("shelf", "shelf/inner"), ("shelf",), ("shelf/inner",), ()])
def test_a_module_is_read_by_its_dotted_name(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...]
) -> None:
    """Also where some of its folders have no __init__.py."""
    (tmp_path / "shelf/inner").mkdir(parents=True)
    for folder in packages:
        (tmp_path / folder / "__init__.py").write_text(NEVER_RUN)
    (tmp_path / "shelf/inner/mine.py").write_text(f"{NEVER_RUN}def f(log_prob, uid): ...")
    monkeypatch.syspath_prepend(tmp_path)
    assert "no uid (did you mean group_ids?)" in problem(base, f"{LOSS}.loss_mode=shelf.inner.mine:f")
    prepare_config(PPOConfig, [*base, f"{LOSS}.loss_mode=no.such.module:f"])


def test_all_of_it_is_told_at_once_and_before_torch(base: list[str], tmp_path: Path) -> None:
    source = """
        import torch
        def loss(log_prob, uid): ...
        def estimate(rewards): ...
        def compute_score(solution_str, gold): ...
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(source))
    keys = (
        f"{LOSS}.loss_mode=MINE:loss algorithm.adv_estimator=MINE:estimate {REWARDS} "
        "actor_rollout_ref.rollout.n=0 data.train_batch_size=8"
    )
    words = [*base, *keys.replace("MINE", str(tmp_path / "mine.py")).split(" ")]
    program = (
        "import sys\nfrom hybridflow.trainer.main_ppo import main\n"
        f"status = main({words[:-2]!r})\nprint(status, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]
    assert "3 problems" in done.stderr and done.stderr.count("did you mean") == 3, done.stderr
