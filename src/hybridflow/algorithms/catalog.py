"""The catalog: every estimator, policy loss, KL estimator and way to aggregate by name, known without torch.

    ESTIMATORS["grpo"] ──► EstimatorFacts: its function, and what that function's source says of itself
    POLICY_LOSSES["gspo"] ──► LossFacts, the same with what a run has to know beside it
    described("module:name") ──► Description: arguments, defaults, formula and papers, read off the source
    FunctionTable ──► the functions themselves; the module of one is imported when it is asked for

A fact is said once, where the function is written: what it reads are the names of its arguments, the defaults
of its paper are the defaults there, its formula opens its docstring, and its papers are the numbers of
arxiv.org in the docstrings of the function and its module. Only what a signature cannot say stands here. The
checks of the configuration, `hybridflow explain` and the documents' table of formulas all read this page.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any, Literal, TypeVar

from hybridflow.errors import ConfigError

T = TypeVar("T")

PACKAGE = Path(__file__).parents[1]
LOSS_ARGUMENTS = ("log_prob", "old_log_prob", "advantages", "response_mask", "scale", "rollout_is_weights")
"""What any policy loss may name beside columns, keys and options: tensors [B, R] of a micro-batch, of which
`rollout_is_weights` may be None, and the counts of its mini-batch.
"""
LOSS_INPUTS = "inputs"
"""The argument by which a policy loss gets all of these as one `LossInputs`, as every built-in one does."""


def takes_by_place(signature: Signature) -> bool:
    """Return whether a policy loss gets `LOSS_ARGUMENTS` by position: it has `*args`, and before that none of
    their names in another place, nor `inputs`.
    """
    kinds = [each.kind for each in signature.parameters.values()]
    if Parameter.VAR_POSITIONAL not in kinds:
        return False
    before = list(signature.parameters)[: kinds.index(Parameter.VAR_POSITIONAL)]
    given = (*LOSS_ARGUMENTS, LOSS_INPUTS)
    return all(given.index(name) == place for place, name in enumerate(before) if name in given)


@dataclass(frozen=True)
class Description:
    """What the source of a function, or of a class, says of it."""

    module: str
    name: str
    arguments: tuple[str, ...]
    """Names of its arguments, in the order of its signature."""
    defaults: Mapping[str, Any]
    """Default values that are literals, by argument."""
    formula: str
    """The first paragraph of its docstring, on one line.

    Arguments are written by their symbols or their names. "= this, or that without `argument`" is this where
    the argument is set or true, else that.
    """
    papers: tuple[str, ...]
    """Their numbers at arxiv.org, those of the module first."""
    place: str
    """file:line of it."""


@cache
def described(function: str) -> Description:
    """Return what the source of one of our functions says; `function` is "hybridflow.module:name".

    The module is read, not imported.
    """
    module, _, name = function.partition(":")
    path = PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    tree = _parsed(path)
    (node,) = [
        each for each in tree.body if isinstance(each, (ast.FunctionDef, ast.ClassDef)) and each.name == name
    ]
    text = ast.get_docstring(node) or ""
    whole = f"{ast.get_docstring(tree)} {text}"
    arguments: list[ast.arg] = []
    defaults: dict[str, Any] = {}
    if isinstance(node, ast.FunctionDef):
        arguments = [*node.args.args, *node.args.kwonlyargs]
        values = [*node.args.defaults, *node.args.kw_defaults]
        for argument, value in zip(reversed(arguments), reversed(values), strict=False):
            if isinstance(value, ast.Constant):
                defaults[argument.arg] = value.value
    return Description(
        module,
        name,
        tuple(argument.arg for argument in arguments),
        defaults,
        formula=" ".join(text.partition("\n\n")[0].split()).removesuffix("."),
        papers=tuple(dict.fromkeys(re.findall(r"\b\d{4}\.\d{5}\b", whole))),
        place=f"{path}:{node.lineno}",
    )


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def load(function: str) -> Callable[..., Any]:
    """Return the function that "hybridflow.module:name" names; only its module is imported."""
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


OF_A_WHOLE_RUN = ("values", "process_rewards", "reward_baselines", "is_demonstration")
"""Columns that an estimator for the rows of some data sources cannot read."""


@dataclass(frozen=True)
class EstimatorFacts:
    """The facts of an advantage estimator: its function, and what it reads."""

    function: str
    """"module:name" below `algorithms/advantages`."""
    scores_from_zero: bool = False
    """Whether a score below 0 is an error."""

    @property
    def path(self) -> str:
        """The "module:name" by which Python finds it."""
        return f"hybridflow.algorithms.advantages.{self.function}"

    @property
    def described(self) -> Description:
        """What its source says of it."""
        return described(self.path)

    @property
    def reads(self) -> tuple[str, ...]:
        """Its arguments: columns of the batch, and parameters that keys set."""
        return self.described.arguments

    @property
    def group(self) -> bool:
        """Whether it needs two or more responses to each prompt."""
        return "group_ids" in self.reads and not self.demonstration_rows

    @property
    def critic(self) -> bool:
        """Whether it reads the values of a critic."""
        return "values" in self.reads

    @property
    def teacher(self) -> bool:
        """Whether it reads the log-probs of a teacher."""
        return "teacher_log_probs" in self.reads

    @property
    def process_rewards(self) -> bool:
        """Whether it reads the rewards of a process reward model."""
        return "process_rewards" in self.reads

    @property
    def token_rewards(self) -> bool:
        """Whether it reads the token rewards, and with them a KL penalty in the reward."""
        return "token_level_rewards" in self.reads

    @property
    def actor_pass(self) -> bool:
        """Whether it reads what only a pass of the actor over the batch can give."""
        return "sum_pi_squared" in self.reads

    @property
    def greedy_rows(self) -> int:
        """Greedy responses to each prompt that are generated besides, and are not learned from."""
        return int("reward_baselines" in self.reads)

    @property
    def demonstration_rows(self) -> int:
        """Rows of each prompt that are the data's own answer: learned from, and not generated."""
        return int("is_demonstration" in self.reads)


@dataclass(frozen=True)
class LossFacts:
    """The facts of a policy loss: its function, what it reads, and its paper's defaults."""

    function: str
    """"module:name" below `algorithms/policy_losses`."""
    select: str = ""
    """Name of the function of its module that is `PolicyLoss.select`."""
    learns_from: str = ""
    """Name of the function of its module that is `PolicyLoss.learns_from`."""
    keeps_groups: bool = False
    """`PolicyLoss.keeps_groups`."""
    has_ratio: bool = True
    """Whether its tokens are weighted by the ratio of the policy to the old one."""
    lowest_ratio: bool = False
    """Whether 1 − clip_ratio_low is the smallest ratio that it lets through."""
    estimators: tuple[str, ...] = ()
    """The estimators that it goes with, and that go with no other loss; none: it goes with all others."""

    def path(self, name: str = "") -> str:
        """Return the "module:name" by which Python finds its function, or another one of its module."""
        module, _, own = self.function.partition(":")
        return f"hybridflow.algorithms.policy_losses.{module}:{name or own}"

    @property
    def described(self) -> Description:
        """What its source says of it."""
        return described(self.path())

    @property
    def selects(self) -> tuple[str, ...]:
        """The parameters of its `select`; none without one."""
        if not self.select:
            return ()
        arguments = described(self.path(self.select)).arguments
        return tuple(name for name in arguments if name not in (*LOSS_ARGUMENTS, "generator"))

    @property
    def reads(self) -> tuple[str, ...]:
        """Its arguments and those of its `select`: columns and parameters, without what every loss takes."""
        own = [name for name in self.described.arguments if name not in (LOSS_INPUTS, "loss_agg_mode")]
        return tuple(dict.fromkeys([*own, *self.selects]))

    @property
    def agg_mode(self) -> str:
        """Value of `actor.loss_agg_mode` in its paper."""
        return str(self.described.defaults["loss_agg_mode"])

    @property
    def clip(self) -> tuple[float, float] | None:
        """(clip_ratio_low, clip_ratio_high) of its paper, where they are not PPO's."""
        own, ppo = (facts.described.defaults for facts in (self, POLICY_LOSSES["vanilla"]))
        if "clip_low" not in own:
            return None
        bounds = (own["clip_low"], own["clip_high"])
        return None if bounds == (ppo["clip_low"], ppo["clip_high"]) else bounds

    @property
    def clip_c(self) -> float | None:
        """`actor.clip_ratio_c` of its paper, where it is not PPO's."""
        bound: float | None = self.described.defaults.get("clip_c")
        return None if bound == POLICY_LOSSES["vanilla"].described.defaults["clip_c"] else bound

    @property
    def reference(self) -> bool:
        """Whether it reads the log-probs of a reference policy."""
        return "ref_log_prob" in self.reads

    @property
    def pairs(self) -> bool:
        """Whether it compares the rows of a prompt with each other."""
        return "group_ids" in self.reads


ESTIMATORS: dict[str, EstimatorFacts] = {
    "gae": EstimatorFacts("gae:gae"),
    "grpo": EstimatorFacts("grpo:grpo"),
    "grpo_passk": EstimatorFacts("grpo_passk:grpo_passk"),
    "gdpo": EstimatorFacts("gdpo:gdpo"),
    "rloo": EstimatorFacts("rloo:rloo"),
    "reinforce_plus_plus": EstimatorFacts("reinforce_plus_plus:reinforce_plus_plus"),
    "reinforce_plus_plus_baseline": EstimatorFacts("reinforce_plus_plus:reinforce_plus_plus_baseline"),
    "remax": EstimatorFacts("remax:remax"),
    "opo": EstimatorFacts("opo:opo"),
    "gpg": EstimatorFacts("gpg:gpg"),
    "optimal_token_baseline": EstimatorFacts("optimal_token_baseline:optimal_token_baseline"),
    "tir_optimal_token_baseline": EstimatorFacts("optimal_token_baseline:tir_optimal_token_baseline"),
    "max_rl": EstimatorFacts("max_rl:max_rl", scores_from_zero=True),
    "prime": EstimatorFacts("prime:prime"),
    "sppo": EstimatorFacts("sppo:sppo"),
    "online_dpo": EstimatorFacts("online_dpo:online_dpo"),
    "spin": EstimatorFacts("spin:spin"),
    "on_policy_distillation": EstimatorFacts("on_policy_distillation:on_policy_distillation"),
}
"""Advantage estimators by their name in `algorithm.adv_estimator`."""

POLICY_LOSSES: dict[str, LossFacts] = {
    "vanilla": LossFacts("vanilla:vanilla", lowest_ratio=True),
    "gspo": LossFacts("gspo:gspo", lowest_ratio=True),
    "sapo": LossFacts("sapo:sapo"),
    "geo_mean": LossFacts("geo_mean:geo_mean"),
    "gmpo": LossFacts("geo_mean:geo_mean"),
    "cispo": LossFacts("cispo:cispo"),
    "gpg": LossFacts("reinforce:reinforce", has_ratio=False),
    "reinforce": LossFacts("reinforce:reinforce", has_ratio=False),
    "clip_cov": LossFacts("entropy_cov:clip_cov", select="select_clip_cov", lowest_ratio=True),
    "kl_cov": LossFacts("entropy_cov:kl_cov", select="select_kl_cov"),
    "dppo_tv": LossFacts("dppo:dppo_tv"),
    "dppo_kl": LossFacts("dppo:dppo_kl"),
    "dro": LossFacts("dro:dro", has_ratio=False),
    "sppo": LossFacts("sppo:sppo", has_ratio=False, estimators=("sppo",)),
    "dpo": LossFacts(
        "dpo:dpo",
        learns_from="in_a_pair",
        keeps_groups=True,
        has_ratio=False,
        estimators=("online_dpo", "spin"),
    ),
}
"""Policy losses by their name in `actor.policy_loss.loss_mode`."""

_K2 = "½(x − y)²"
_K3 = "e^d − d − 1 with d = clamp(y − x, ±20), the result clamped to ±10"
KL_ESTIMATORS: dict[str, str] = {
    "kl": "x − y",
    "k1": "x − y",
    "abs": "|x − y|",
    "mse": _K2,
    "k2": _K2,
    "low_var_kl": _K3,
    "k3": _K3,
}
"""Estimates of KL(π ‖ π_ref) at a token by their names, with x = logπ and y = logπ_ref."""

LossAggMode = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]
AGGREGATIONS: dict[str, str] = {
    "token-mean": "Σ/num_tokens",
    "token-sum": "Σ",
    "seq-mean-token-sum": "Σ_i Σ_t/num_sequences",
    "seq-mean-token-mean": "Σ_i mean_t/num_sequences",
    "seq-mean-token-sum-norm": "Σ_i Σ_t/(num_sequences·scale_factor)",
}
"""Ways from token losses to one number by their names, with sums over the tokens t of the mask and rows i."""

RESAMPLING: dict[str, str] = {
    "pow": "w = |s|^p",
    "max_min": "w = 1 where s is the batch's highest or lowest, else 0",
    "max_random": "w = 0.4 where s is the highest, else 0.1",
}
"""Weights w of rows with the scores s by their names in `algorithm.pf_ppo.reweight_method`, p: weight_pow."""


class FunctionTable(UserDict[str, T]):
    """Functions by name: those of the catalog, each loaded when it is first asked for, and a user's own."""

    def __init__(self, noun: str, names: Collection[str], load_entry: Callable[[str], T]) -> None:
        super().__init__()
        self._noun = noun
        self._load_entry = load_entry
        self.data: dict[str, Any] = dict.fromkeys(names)

    def add(self, name: str, entry: T) -> None:
        """Enter a user's own. Raises ConfigError for a name that is taken."""
        if name in self:
            raise ConfigError(
                f"{self._noun} {name!r} exists already: give yours another name than {', '.join(self)}"
            )
        self.data[name] = entry

    def __getitem__(self, name: str) -> T:
        if self.data[name] is None:
            self.data[name] = self._load_entry(name)
        found: T = self.data[name]
        return found
