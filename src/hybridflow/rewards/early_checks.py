"""Checks of the reward against the data without a model: sources, ground truth, returned keys.

    SplitFacts of the data files, reward.*, algorithm.* ──check_reward──► RewardError or ConfigError, or
    nothing

A user's own function is not looked into: nothing is known of the keys that it returns or of what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridflow.config.needs import may_score_itself
from hybridflow.config.reward import CUSTOM, JUDGE_APART, MODEL_TERM, RewardConfig, has_judge
from hybridflow.config.root import PPOConfig
from hybridflow.data.early_checks import SplitFacts
from hybridflow.data.plugin import check_location
from hybridflow.data.row_schema import UNNAMED_SOURCE
from hybridflow.errors import ConfigError, RewardError
from hybridflow.rewards.load import (
    REWARD_FUNCTIONS,
    check_name,
    check_options,
    function_of,
    is_path,
    split_path,
    unknown_source,
)

SCORE_NAMES = ("score", "seq_reward", "seq_final_reward")
"""Names of `algorithm.filter_groups.metric` for the score itself."""


def check_reward(config: PPOConfig, splits: Sequence[SplitFacts]) -> None:
    """Raise RewardError or ConfigError for what would stop the run when the first responses are scored.

    That is a function that does not exist and keys of `algorithm` that no built-in reward returns. Unless an
    environment or an agent may give the rewards, it is also a data source that `auto` knows no reward for,
    and rows without the ground truth that a built-in reward needs.
    """
    _check_functions(config.reward)
    if not may_score_itself(config):
        for split in splits:
            _check_sources(config.reward, split)
            _check_truth(config.reward, split)
    sources = [name for split in splits if split.key != "data.val_files" for name in split.sources]
    _check_keys(config, sources)


def refuse_model(reward: RewardConfig) -> None:
    """Raise ConfigError for a reward model where only functions score."""
    if has_judge(reward):
        raise ConfigError(
            "reward.reward_model.kind=generative: here no model is started that is asked for verdicts: "
            f"{JUDGE_APART}; to try other functions alone, set enable=false and leave the term judge out"
        )
    if reward.reward_model.enable:
        raise ConfigError(
            "reward.reward_model.enable=true: here no model is started, and its part of the score would be "
            "missing. `hybridflow eval MODEL` scores by functions and the reward model; to try the functions "
            "alone, set reward.reward_model.enable=false and leave the term reward_model out of reward.terms"
        )


def names_of(reward: RewardConfig) -> list[str]:
    """The built-in functions that the run scores with, `auto` among them, and the paths of the user's own."""
    if reward.terms:
        return [str(term.get("name")) for term in reward.terms if isinstance(term, dict)]
    return [reward.custom_reward_function.path or reward.function]


def _check_functions(reward: RewardConfig) -> None:
    """Raise ConfigError for a built-in function or a file that does not exist; a user's file is not run."""
    custom = reward.custom_reward_function
    if reward.terms:
        for position, term in enumerate(reward.terms):
            if isinstance(term, dict) and isinstance(term.get("name"), str) and term["name"] != MODEL_TERM:
                _check_function(term["name"], f"reward.terms[{position}]")
    elif custom.path:
        check_location(split_path(custom.path)[0], key=CUSTOM)
    else:
        _check_function(reward.function, "reward.function")
        if not is_path(reward.function):
            asked = {"model": reward.reward_model.model.path} if has_judge(reward) else {}
            check_options(reward.function, {**asked, **custom.reward_kwargs}, key="reward.function")


def _check_function(name: str, key: str) -> None:
    if is_path(name):
        check_location(split_path(name)[0], key=key)
    else:
        check_name(name, key=key)


def _check_sources(reward: RewardConfig, split: SplitFacts) -> None:
    if "auto" not in names_of(reward):
        return
    unknown = [source for source in split.sources if function_of(source) is None]
    # rows of an unknown source are errors that reward.on_error may forgive, but not all of them
    if unknown and (reward.on_error == "raise" or len(unknown) == len(split.sources)):
        others = ""
        if len(unknown) > 1:
            others = f" (and {len(unknown) - 1} more unknown sources)"
        nameless = ""
        if unknown[0] == UNNAMED_SOURCE:
            nameless = f"the rows name no source, so theirs is {UNNAMED_SOURCE!r}, and "
        raise RewardError(f"{split.source}: {nameless}{unknown_source(unknown[0])}{others}")


def _check_truth(reward: RewardConfig, split: SplitFacts) -> None:
    """Raise RewardError for files without a ground truth, or whose first rows have none, that need one."""
    needing = _needing_truth(reward, split.sources)
    if needing and not {"reward_model", "answer"} & set(split.columns) and split.columns:
        raise RewardError(
            f"{split.source} has neither a column reward_model with a ground_truth in it nor a column "
            f"answer, and the reward {needing[0]} compares the response with the ground truth: add one, or "
            f"choose a reward that needs none (its columns: {', '.join(split.columns)})"
        )
    for file, sources in split.without_truth.items():
        needing = _needing_truth(reward, sources)
        if needing and reward.on_error == "raise":
            raise RewardError(
                f"{file}: none of its first rows has a ground truth (reward_model.ground_truth, or the "
                f"column answer), and the reward {needing[0]} compares the response with it: add one, or "
                "choose a reward that needs none"
            )


def _needing_truth(reward: RewardConfig, sources: Sequence[str]) -> list[str]:
    """Return the built-in functions that score rows of some sources and fail without a ground truth."""
    names = set(names_of(reward))
    if "auto" in names:
        names |= _functions_of(sources)
    return sorted(name for name in names & set(REWARD_FUNCTIONS) if REWARD_FUNCTIONS[name].needs_truth)


def _functions_of(sources: Sequence[str]) -> set[str]:
    """The built-in functions that `auto` takes for the sources that it knows."""
    return {name for source in sources if (name := function_of(source)) is not None}


def returned_keys(reward: RewardConfig, sources: Sequence[str]) -> tuple[set[str], set[str]] | None:
    """The keys besides `score` of some rows, and those of all rows; None if not known."""
    some: set[str] = set()
    every: set[str] = set()
    for position, name in enumerate(names_of(reward)):
        functions = {name}
        if name == "auto":
            functions = _functions_of(sources) or set(REWARD_FUNCTIONS)
        if not functions <= set(REWARD_FUNCTIONS):
            return None
        column = set()
        if reward.terms:
            column = {str(reward.terms[position].get("key", name))}
        returned = [column | set(REWARD_FUNCTIONS[function].returns) for function in functions]
        some |= set.union(*returned)
        if not reward.terms or "when" not in reward.terms[position]:
            every |= set.intersection(*returned)
    return some, every


def _check_keys(config: PPOConfig, sources: Sequence[str]) -> None:
    known = returned_keys(config.reward, sources)
    if known is None:
        return
    some, every = known
    if config.reward.reward_kwargs.overlong_buffer_cfg.enable:
        some.add("overlong_reward")
        every.add("overlong_reward")
    what = f"the reward ({' + '.join(names_of(config.reward))}) returns"
    wanted = config.algorithm.gdpo_reward_keys
    # where the sources are not known, a key that some function returns may be one of every row
    allowed = every
    if "auto" in names_of(config.reward) and not sources:
        allowed = some
    if missing := [key for key in wanted if key != "score" and key not in allowed]:
        raise ConfigError(
            f"algorithm.gdpo_reward_keys names {', '.join(missing)}, which {what} not for every row; it "
            f"returns {', '.join(['score', *sorted(allowed)])}: name some of these, or add a term that "
            "returns the key (reward.terms)"
        )
    filters = config.algorithm.filter_groups
    if filters.enable and filters.metric not in SCORE_NAMES and filters.metric not in some:
        raise ConfigError(
            f"algorithm.filter_groups.metric={filters.metric}: {what} no such key; it returns "
            f"{', '.join(['score', *sorted(some)])}: set algorithm.filter_groups.metric to one of these"
        )
