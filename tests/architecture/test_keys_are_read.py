"""No dead keys: each key of the schema is read by name in the code outside `config/`."""

from __future__ import annotations

import ast

from sources import sources

from hybridflow.config import PPOConfig, SFTConfig
from hybridflow.config.tree import keys_of

# Keys that act while the configuration is made or checked, and nowhere else.
READ_IN_CONFIG = {
    "actor_rollout_ref.model.tokenizer_path": "resolve: becomes data.tokenizer",
    "model.tokenizer_path": "resolve: becomes data.tokenizer",
    "critic.model.tokenizer_path": "check: the critic reads the actor's token ids",
    "reward.process_reward_model.model.tokenizer_path": (
        "resolve: the process reward model reads the actor's token ids"
    ),
    "distillation.teacher_model.tokenizer_path": "resolve: the teacher reads the actor's token ids",
    "actor_rollout_ref.actor.strategy": "resolve: fsdp means fsdp2, the one engine of this version",
}


def names_read() -> set[str]:
    """Every attribute that is read, and every string, in the code outside `config/`: strings for getattr and
    tables of names.
    """
    found: set[str] = set()
    for source in sources():
        if source.room == "config":
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found.add(node.value)
    return found


def test_each_key_is_read() -> None:
    read = names_read()
    unread = [
        path
        for root in (PPOConfig, SFTConfig)
        for path in keys_of(root)
        if path not in READ_IN_CONFIG
        and path.rpartition(".")[2] not in read
        and not {"clip_low", "clip_high"} & _through(path)
    ]
    assert not unread, f"keys that nothing reads: {unread}"


def _through(path: str) -> set[str]:
    """Properties through which a key is read."""
    return {
        "actor_rollout_ref.actor.clip_ratio": {"clip_low"},
        "actor_rollout_ref.actor.clip_ratio_low": {"clip_low"},
        "actor_rollout_ref.actor.clip_ratio_high": {"clip_high"},
    }.get(path, set()) & names_read()
