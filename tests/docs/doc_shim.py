"""`hybridflow` and `python` as the blocks of the documents find them on PATH: the real ones, made short.

    words of a page ──check──► keys as they stand ──short──► the same command on two steps ──► its exit status

A run saves its last step under the number that the page expects too, so that later commands find it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from doc_words import MODULES, check_keys, filled, parsed, root_of

from hybridflow.config import RUNS, PPOConfig

STEPS = 2
TOKENS = 12
ROWS = 4
BOTH = [f"trainer.total_training_steps={STEPS}", "trainer.num_threads=1", "data.train_batch_size=4"]


def short_words(root: type[Any], config: Any) -> list[str]:
    """Return the overrides that make a run of `config` take seconds."""
    words = [*BOTH]
    if config.trainer.save_freq > 0:
        words.append(f"trainer.save_freq={STEPS}")
    if config.data.task.name:
        words += ["data.task.size=16", "data.task.val_size=4"]
    if root is not PPOConfig:
        return words
    roles = "actor_rollout_ref"
    words += [
        f"data.max_response_length={min(TOKENS, config.data.max_response_length)}",
        "trainer.val_before_train=false",
    ]
    words += [f"{roles}.actor.ppo_mini_batch_size=2", "trainer.n_gpus_per_node=1", "trainer.nnodes=1"]
    words.append(f"{roles}.rollout.n={min(2, config.actor_rollout_ref.rollout.n)}")
    if config.critic.enable and config.critic.ppo_mini_batch_size is not None:
        words.append("critic.ppo_mini_batch_size=2")
    if config.trainer.critic_warmup:
        words.append("trainer.critic_warmup=1")
    if config.algorithm.filter_groups.enable:
        words.append("data.gen_batch_size=4")
    return words


def shortened(root: type[Any], overrides: Sequence[str], recipe: str | None) -> tuple[list[str], Any]:
    """Return the overrides of the short run, and the configuration of the page's own words."""
    own = filled(overrides, root)
    config = check_keys(root, own, recipe)
    return [*own, *short_words(root, config)], config


def link_steps(config: Any) -> None:
    """Let the last checkpoint be found under the number that the whole run would have given it."""
    folder = Path(config.trainer.default_local_dir)
    wanted = config.trainer.total_training_steps
    if wanted and (folder / f"global_step_{STEPS}").is_dir():
        target = folder / f"global_step_{wanted}"
        if not target.exists():
            target.symlink_to(f"global_step_{STEPS}")


def main(words: list[str]) -> int:
    """Run a command of a page, made short where it would be long."""
    program = words[0]
    if program == "python":
        return _python(words[1:])
    from hybridflow.cli.main import main as hybridflow

    options = parsed(words[1:])
    if options is None or options.command not in {*RUNS, "eval", "generate", "reward-test", "config", "demo"}:
        return hybridflow(words[1:])
    root = root_of(options)
    recipe = getattr(options, "recipe", None)
    if options.command in ("eval", "generate"):
        return hybridflow([*words[1:], f"data.max_response_length={TOKENS}", f"data.val_max_samples={ROWS}"])
    if options.command == "demo":
        raise SystemExit("a demo takes minutes: mark its block parse-only")
    if options.command not in RUNS:
        rest = [word for word in words[1:] if word not in options.overrides]
        return hybridflow([*rest, *filled(options.overrides, root)])
    overrides, config = shortened(root, options.overrides, recipe)
    status = hybridflow([options.command, *(["--recipe", recipe] if recipe else []), *overrides])
    link_steps(config)
    return status


def _python(words: list[str]) -> int:
    module = words[1] if words[:1] == ["-m"] else ""
    arguments = words[2:]
    if module in MODULES:
        arguments, _ = shortened(MODULES[module], arguments, None)
    if module == "hybridflow.trainer.main_generation":
        arguments = [*arguments, f"rollout.response_length={TOKENS}"]
    if module:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif words[:1] == ["-c"]:
        exec(compile(words[1], "-c", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        runpy.run_path(words[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
