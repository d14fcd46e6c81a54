"""The sizes of a step and the steps of a run, as far as they follow from the keys alone.

    resolved config, rows of training data ──explain──► lines (label, value, how)

`explain/run.py` has the lines that need processes and models too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import NamedTuple

from hybridflow.config.needs import longest_row, responses_per_prompt, rows_per_prompt, uses_agents
from hybridflow.config.preference import items_per_row, rows_per_item
from hybridflow.config.root import PPOConfig, SFTConfig

TURNS = "turns of the model in a conversation, at most"
CONVERSATION = "tokens of a whole conversation, at most"


class Line(NamedTuple):
    """One fact: its label, its value with the unit, and the keys and the arithmetic behind it."""

    label: str
    value: str
    how: str


def explain(
    config: PPOConfig | SFTConfig, num_train_rows: int | None = None, columns: Collection[str] | None = None
) -> list[Line]:
    """Return the sequences, mini-batches and optimizer steps of a step and of the run, over all processes.

    `columns`: those of the training rows (`items_per_row`).
    """
    if isinstance(config, PPOConfig):
        return list(_ppo_sizes(config, num_train_rows))
    return list(_sft_sizes(config, num_train_rows, columns))


def num_training_steps(
    config: PPOConfig | SFTConfig, num_train_rows: int | None, columns: Collection[str] | None = None
) -> int | None:
    """Return trainer.total_training_steps, or epochs × steps an epoch; None for an unknown number of rows.

    An epoch ends where fewer than data.train_batch_size rows are left. A step of dynamic sampling in which
    groups are dropped draws further generation batches: the steps stay as many, and the data is gone through
    more often.
    """
    rows = num_train_rows
    trainer = config.trainer
    limit = config.data.train_max_samples
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if rows is None and config.data.task.name:
        rows = config.data.task.size
    if rows is None:
        return None
    if limit >= 0:
        rows = min(rows, limit)
    return trainer.total_epochs * (rows * items_per_row(config, columns) // rows_per_step(config))


def rows_per_step(config: PPOConfig | SFTConfig) -> int:
    """Return the training rows that a step draws; with dynamic sampling the fewest, in whole batches."""
    data = config.data
    if not isinstance(config, PPOConfig) or not config.algorithm.filter_groups.enable:
        return data.train_batch_size
    batch = generation_batch(config)
    return math.ceil(data.train_batch_size / batch) * batch


def generation_batch(config: PPOConfig) -> int:
    """Return the number of prompts that are generated for at once."""
    data = config.data
    if config.algorithm.filter_groups.enable and data.gen_batch_size:
        return data.gen_batch_size
    return data.train_batch_size


def _steps_line(
    config: PPOConfig | SFTConfig, num_train_rows: int | None, columns: Collection[str] | None = None
) -> Line:
    steps = num_training_steps(config, num_train_rows, columns)
    if steps is None:
        return Line("training steps", "not known yet", "the number of training rows is needed")
    rows = "training rows"
    if items_per_row(config, columns) > 1:
        rows += " × 2 answers"
    how = f"trainer.total_epochs={config.trainer.total_epochs} × ({rows} // {rows_per_step(config)})"
    if config.trainer.total_training_steps is not None:
        how = "trainer.total_training_steps"
    return Line("training steps", f"{steps:,}", how)


def _ppo_sizes(config: PPOConfig, num_train_rows: int | None) -> Iterator[Line]:
    batch = config.data.train_batch_size
    actor = config.actor_rollout_ref.actor
    rows = batch * rows_per_prompt(config)
    n = config.actor_rollout_ref.rollout.n
    each = f"rollout.n={n}"
    if rows_per_prompt(config) > n:
        each = f"({each} + the data's own answer)"
    yield Line("sequences per step", f"{rows:,}", f"data.train_batch_size={batch} × {each}")
    yield from _generated_lines(config)
    longest, why = longest_row(config)
    if uses_agents(config):
        turns = config.actor_rollout_ref.rollout.multi_turn.max_assistant_turns
        value = "as many as fit" if turns is None else f"{turns:,}"
        yield Line(TURNS, value, "rollout.multi_turn.max_assistant_turns")
        how = f"{why}: all that the model reads and writes, of which it learns from what it writes"
        yield Line(CONVERSATION, f"{longest:,}", how)
    yield Line("tokens per step, at most", f"{rows * longest:,}", f"{rows:,} × ({why})")
    minis = math.ceil(batch / actor.ppo_mini_batch_size)
    how = f"data.train_batch_size / actor.ppo_mini_batch_size={actor.ppo_mini_batch_size}"
    yield Line("mini-batches per step", f"{minis:,}", how)
    per_step = minis * actor.ppo_epochs
    how = f"{minis} mini-batches × actor.ppo_epochs={actor.ppo_epochs}"
    yield Line("optimizer steps per step", f"{per_step:,}", how)
    yield _steps_line(config, num_train_rows)
    steps = num_training_steps(config, num_train_rows)
    if steps is not None:
        yield Line("optimizer steps in all", f"{steps * per_step:,}", f"{steps:,} steps × {per_step}")


def _generated_lines(config: PPOConfig) -> Iterator[Line]:
    """Yield the lines on rows that are generated, where they are not those that are trained on."""
    n = config.actor_rollout_ref.rollout.n
    groups = config.algorithm.filter_groups
    generated = responses_per_prompt(config)
    prompts = rows_per_step(config)
    label = "responses generated per step"
    each = f"rollout.n={n}"
    if generated > n:
        each = f"({each} + {generated - n} greedy)"
    if groups.enable:
        batch = generation_batch(config)
        each = f"data.gen_batch_size={batch} × {each}"
        how = f"{prompts // batch} generation batches of {each}"
        yield Line(f"{label}, at least", f"{prompts * generated:,}", how)
        if most := groups.max_num_gen_batches:
            how = f"filter_groups.max_num_gen_batches={most} × {each}"
            yield Line(f"{label}, at most", f"{most * batch * generated:,}", how)
    elif generated != rows_per_prompt(config):
        yield Line(label, f"{prompts * generated:,}", f"data.train_batch_size={prompts} × {each}")


def _sft_sizes(
    config: SFTConfig, num_train_rows: int | None, columns: Collection[str] | None
) -> Iterator[Line]:
    data = config.data
    each = rows_per_item(config)
    rows = data.train_batch_size * each
    how = "data.train_batch_size"
    if each > 1:
        how += f" × {each} answers"
    yield Line("conversations per step", f"{rows:,}", how)
    how = f"× data.max_length={data.max_length:,}"
    yield Line("tokens per step, at most", f"{rows * data.max_length:,}", how)
    yield _steps_line(config, num_train_rows, columns)


def format_bytes(size: float) -> str:
    """Return a number of bytes as a text in the unit that reads best."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit == "MiB" and size < 10 else f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
