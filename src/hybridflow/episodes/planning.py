"""The requests of prompts: how many each group has, and their sampling seeds.

prompts ──training_requests, validation_requests──► RequestBatch: what is sampled, and what the data answers

With an estimator that names `reward_baselines` (ReMax), each prompt has a greedy response more in the same
rollout and score calls; its score becomes the column, the row goes. With one that names `is_demonstration`
(SPIN), each group has the data's own answer as a row more; the reward function scores it like the others, and
dynamic sampling does not look at it. With `distillation.lmbda` below 1 (GKD) some groups have that answer
instead of a sampled one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hybridflow.agent.single_turn import RequestBatch, build_requests, one_more_each
from hybridflow.config import PPOConfig
from hybridflow.config.actor_rollout_ref import RolloutConfig, ValKwargsConfig
from hybridflow.data.prompts import PromptRow
from hybridflow.errors import ConfigError
from hybridflow.protocol.randomness import derive_seed
from hybridflow.rollout.base import SamplingParams

BASELINES = "reward_baselines"
DEMONSTRATIONS = "is_demonstration"


def greedy_sample(config: PPOConfig) -> int:
    """Return the number of the greedy response in its group, after the sampled ones."""
    return config.actor_rollout_ref.rollout.n


def demonstration_sample(config: PPOConfig) -> int:
    """Return the number of the data's own answer in its group, after all others."""
    return config.actor_rollout_ref.rollout.n + 1


def shows_data(config: PPOConfig, needs: Collection[str]) -> bool:
    """Return whether a row may have the data's own answer, under an estimator that reads `needs`.

    ConfigError where it would be the only row of a group whose estimator reads a greedy one too.
    """
    if config.distillation.lmbda < 1 and BASELINES in needs:
        raise ConfigError(
            f"distillation.lmbda={config.distillation.lmbda} leaves groups with the data's answer alone, and "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} reads {BASELINES}: set lmbda=1"
        )
    return DEMONSTRATIONS in needs or config.distillation.lmbda < 1


def _is_given(config: PPOConfig, group: int) -> bool:
    """Return whether GKD takes the data's answer for the group of this number, by a draw of its own."""
    draw = derive_seed(config.trainer.seed, "distillation.lmbda", group) / 2**63
    return draw >= config.distillation.lmbda


def training_requests(
    config: PPOConfig, needs: Collection[str], first_group: int, prompts: Sequence[PromptRow]
) -> tuple[RequestBatch, RequestBatch]:
    """Return the requests of groups that are numbered from `first_group`, and the rows whose answers are the
    data's own, for an estimator that reads the columns `needs`. Request ids count from 0.

    With P = `data.train_batch_size`, group i has the numbers and seeds of row (i % P)·n of step i // P + 1:
    those of the step that trains it, where every group is trained.
    """
    rollout = config.actor_rollout_ref.rollout
    sampling = replace(sampling_of(config, rollout), greedy=not rollout.do_sample)
    period = config.data.train_batch_size
    sampled = RequestBatch([], [], [], [])
    while len(prompts):
        number, place = divmod(first_group, period)
        part = prompts[: period - place]
        sampled += build_requests(
            part,
            sampling,
            n=rollout.n,
            seed=config.trainer.seed,
            purpose="rollout",
            step=number + 1,
            first_row=place * rollout.n,
        )
        first_group += len(part)
        prompts = prompts[len(part) :]
    given = RequestBatch([], [], [], [])
    if config.distillation.lmbda < 1:
        is_given = [_is_given(config, group) for group in sampled.groups]
        given = sampled.chosen(is_given)
        sampled = sampled.chosen([not each for each in is_given])
    numbered = [replace(request, request_id=place) for place, request in enumerate(sampled.requests)]
    sampled = replace(sampled, requests=numbered)
    requests = sampled
    if BASELINES in needs:
        greedy = replace(sampling, greedy=True)
        requests += one_more_each(sampled, greedy, first_row=len(sampled), sample=greedy_sample(config))
    if DEMONSTRATIONS in needs:
        given += sampled
    if given.requests:
        sample = demonstration_sample(config)
        given = one_more_each(given, sampling, first_row=len(requests), sample=sample)
    return requests, given


def validation_requests(
    config: PPOConfig, prompts: Sequence[PromptRow], step: int, first_row: int = 0
) -> RequestBatch:
    """Make `val_kwargs.n` requests for each prompt, whose draws depend on (seed, step, row) alone; rows
    are numbered from `first_row`.
    """
    val = config.actor_rollout_ref.rollout.val_kwargs
    greedy = not val.do_sample or val.temperature == 0.0
    sampling = replace(sampling_of(config, val), greedy=greedy)
    if greedy:
        sampling = replace(sampling, temperature=1.0)
    seed = config.trainer.seed
    return build_requests(
        prompts, sampling, n=val.n, seed=seed, purpose="validation", step=step, first_row=first_row
    )


def sampling_of(config: PPOConfig, keys: RolloutConfig | ValKwargsConfig) -> SamplingParams:
    """Return the sampling parameters by these keys; what ends a response is the same for all."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=keys.temperature,
        top_k=keys.top_k,
        top_p=keys.top_p,
        min_p=keys.min_p,
        repetition_penalty=keys.repetition_penalty,
        stop=tuple(rollout.stop),
        stop_token_ids=tuple(rollout.stop_token_ids),
        ignore_eos=rollout.ignore_eos,
    )
