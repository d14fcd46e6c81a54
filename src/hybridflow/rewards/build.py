"""From the `reward.*` keys to a RewardManager.

The reward function is loaded here, so a wrong one shows before a model is allocated.
"""

from __future__ import annotations

from functools import partial

from hybridflow.config.reward import RewardConfig
from hybridflow.config.source_code import in_memory
from hybridflow.rewards.cache import CachedScorer
from hybridflow.rewards.compose import describe, resolve
from hybridflow.rewards.manager import RewardManager
from hybridflow.rewards.request import Scorer


def build_reward_manager(config: RewardConfig, seed: int) -> RewardManager:
    """Load the reward function that the configuration chooses and start the processes that call it.

    Raises ConfigError if it cannot be found, imported or called as reward functions are, RewardError if a
    built-in one needs an extra that is not installed or a worker does not start.
    """
    scorer: Scorer
    if config.num_workers > 0:
        from hybridflow.rewards.pool import RewardPool

        scorer = RewardPool(config, seed)
    else:
        from hybridflow.rewards.in_process import InProcessScorer

        scorer = InProcessScorer(partial(resolve, config, seed), config.timeout)
    if config.cache_size:
        scorer = CachedScorer(scorer, config.cache_size)
    names = [config.function, *(str(term.get("name")) for term in config.terms)]
    return RewardManager(
        scorer,
        on_error=config.on_error,
        function=describe(config),
        has_file=not any(map(in_memory, names)),
    )
