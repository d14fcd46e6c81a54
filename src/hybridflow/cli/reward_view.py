"""The rows and the tables of `hybridflow reward-test`; torch is needed only where a model answers."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hybridflow.config import PPOConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.needs import uses_agents
from hybridflow.data.files import Row, Rows, as_list, load_rows
from hybridflow.data.messages import media_keys
from hybridflow.data.row_schema import PLAIN_PROMPTS, PROMPT_HINT, complete_row, require_prompts
from hybridflow.errors import DataError
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.dry_run import GROUND_TRUTH, choose_responses, dry_run
from hybridflow.rewards.early_checks import refuse_model

logger = logging.getLogger(__name__)

GENERATE = "generate"
SHOWN = 100
"""Characters of a prompt and of a response in the table."""


def show_reward_test(config: PPOConfig, *, rows: int, response: str) -> int:
    """Score the first rows and print them; status 1 where a row failed."""
    refuse_model(config.reward)
    console = Console()
    if response == GENERATE:
        from hybridflow.cli.reward_generate import generate_responses

        chosen, texts = generate_responses(config, rows)
        console.print(Text(f"Fed as the response: what {config.actor_rollout_ref.model.path} answers."))
    else:
        chosen = first_rows(config, rows)
        texts = []
        console.print(Text(f"Fed as the response: {choose_responses(response, chosen, config.reward)[0]}."))
    # one process suffices for a few rows, and starts faster than several
    reward = replace(config.reward, num_workers=min(config.reward.num_workers, 1))
    with closing(build_reward_manager(reward, config.trainer.seed)) as manager:
        results = dry_run(
            manager,
            chosen,
            config.reward,
            response=texts or response,
            num_rows=len(chosen),
            are_conversations=uses_agents(config),
        )
    console.print(_table(results))
    for text in failures(results):
        console.print(Text(text))
    failed = sum(bool(result["error"]) for result in results)
    summary = f"{len(results) - failed} of {len(results)} rows scored"
    if failed:
        summary += f", {failed} failed"
    elif response == GROUND_TRUTH:
        zeros = sum(result["score"] == 0 for result in results)
        if zeros:
            summary += f"; {zeros} score 0 though their response is the ground truth"
    print(summary)
    return int(failed > 0)


def first_rows(config: PPOConfig, count: int) -> list[Row]:
    """The first rows of the training data with the fields that a run gives them.

    Files are read without a tokenizer; a task or a class of the user's own needs torch, or the tokenizer too.
    Raises DataError where no row can be used.
    """
    data = config.data
    if data.custom_cls.path:
        from hybridflow.cli.reward_generate import usable_prompts

        return [prompt.row for prompt in usable_prompts(config, count)[1]]
    if data.task.name:
        from hybridflow.data.tasks import build_task

        rows = Rows([build_task(data.task).rows("train", min(count, data.task.size))], data.task.name)
    else:
        rows = load_rows(as_list(data.train_files), data.cache_dir)
        require_prompts(rows, data)
        rows.refuse_media("no key names it", read=media_keys(data))
    found = _usable(rows, count, data)
    if isinstance(found[0]["raw_prompt"], str):
        logger.warning(PLAIN_PROMPTS, rows.source, "go to the model")
    return found


def _usable(rows: Rows, count: int, data: DataConfig) -> list[Row]:
    found: list[Row] = []
    reason = ""
    for index, row in enumerate(rows):
        if len(found) == count:
            break
        columns = ", ".join(row)
        try:
            found.append(complete_row(row, index, data))
        except KeyError as error:
            reason = reason or f"row {index} has no column {error}; its columns: {columns}; {PROMPT_HINT}"
        except (TypeError, ValueError) as error:
            reason = reason or f"row {index}: {error}"
    if not found:
        raise DataError(f"{rows.source}: no row can be used; {reason or 'there is none'}")
    return found


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(
        "row",
        "source",
        "prompt",
        "response",
        "truth",
        Column("score", min_width=14, overflow="fold"),
        "seconds",
        title="Rewards",
        title_justify="left",
    )
    for result in results:
        score = "failed"
        if not result["error"]:
            extras = [f"{name}={_short(str(value))}" for name, value in result["extras"].items()]
            score = " ".join([f"{result['score']:g}", *extras])
        table.add_row(
            str(result["row"]),
            Text(str(result["data_source"])),
            Text(_short(result["prompt"])),
            Text(_short(result["response"])),
            Text(_short(str(result["ground_truth"]))),
            Text(score),
            f"{result['seconds']:.3f}",
        )
    return table


def _short(text: str) -> str:
    """The end of a long text: the question of a prompt and the answer of a response are there."""
    if len(text) <= SHOWN:
        return text
    return "… " + text[-SHOWN:]


def failures(results: list[dict[str, Any]]) -> list[str]:
    """One text for each kind of failure: its rows, and the whole of the first of them.

    Failures are of one kind where all but the last line of their tracebacks, the message, are the same.
    """
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        error = result["error"]
        if error:
            kind = (error.partition(":")[0], error.rpartition("\n")[0])
            kinds.setdefault(kind, []).append(result)
    texts = []
    for (name, _), members in kinds.items():
        numbers = ", ".join(str(member["row"]) for member in members)
        detail = members[0]["error"].partition(": ")[2]
        texts.append(
            f"{name} in {len(members)} of {len(results)} rows (row {numbers}); the first:\n{detail}\n"
        )
    return texts
