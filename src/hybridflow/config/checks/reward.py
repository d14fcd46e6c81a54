"""The checks of the keys that choose the reward function."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.reward import CUSTOM, MODEL_TERM, RewardConfig


def reward_problems(reward: RewardConfig) -> Iterator[str]:
    """Yield one line for more than one choice of the reward, and for options that no function gets."""
    choices = {
        "reward.terms": repr(reward.terms) if reward.terms else "",
        f"{CUSTOM}.path": reward.custom_reward_function.path or "",
        "reward.function": reward.function if reward.function != "auto" else "",
    }
    chosen = [f"{key}={value}" for key, value in choices.items() if value]
    if len(chosen) > 1:
        yield (
            f"{' and '.join(chosen)} each choose the reward: keep one (a path.py:name may also be the name "
            "of a term)"
        )
    named = [term.get("name") for term in reward.terms if isinstance(term, dict)].count(MODEL_TERM)
    learned = reward.reward_model
    if named > 1:
        yield f"reward.terms names {MODEL_TERM} {named} times, and a run has one reward model: keep one"
    if named and not learned.enable:
        yield (
            f"reward.terms names {MODEL_TERM}, which is off: set reward.reward_model.enable=true and "
            "reward.reward_model.model.path"
        )
    if learned.enable and chosen and not named:
        yield (
            f"reward.reward_model.enable=true beside {chosen[0]}, which does not use its score: join them by "
            f"reward.terms=[{{name: {MODEL_TERM}}}, {{name: FUNCTION or path.py:name}}]"
        )
    most = learned.forward_max_token_len_per_gpu
    if learned.enable and most and learned.max_length and learned.max_length > most:
        yield (
            f"reward.reward_model.max_length={learned.max_length} is more than "
            f"forward_max_token_len_per_gpu={most}, which holds a whole conversation: lower the "
            "one or raise the other"
        )
    if learned.enable and (learned.model.lora_rank or learned.model.lora_adapter_path):
        yield "reward.reward_model.model.lora_rank: the reward model does not train; merge its adapter first"
    if reward.terms and reward.custom_reward_function.reward_kwargs:
        yield f"{CUSTOM}.reward_kwargs has no effect with reward.terms: write the options into the term"
    if reward.manager == "batch" and not reward.custom_reward_function.path:
        yield f"reward.manager=batch calls a function of yours with lists: set {CUSTOM}.path"
    if reward.manager not in (None, "batch") and ":" not in reward.manager:
        yield f"reward.manager={reward.manager}: wanted batch, or path/to/file.py:name"
    limits = ("max_retries", "max_concurrent", "max_rpm", "max_tpm")
    used = [f"reward.{name}" for name in limits if getattr(reward, name)]
    if reward.manager and used:
        yield (
            f"{', '.join(used)} hold for responses that are scored one by one, and reward.manager="
            f"{reward.manager} scores all in one call: leave them out, or limit the requests in the manager"
        )
    if reward.manager:
        used = ["reward.manager"]
    if used and reward.num_workers == 0:
        yield (
            f"{', '.join(used)} hold where processes score, and reward.num_workers=0 scores in the trainer's "
            "own: set reward.num_workers to 1 or more"
        )
