"""The rows and the tables of `hybridflow reward-test`; torch is needed only where a model answers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from hybridflow.config import PPOConfig
from hybridflow.config.data import DataConfig
from hybridflow.config.needs import uses_agents
from hybridflow.config.reward import RewardConfig
from hybridflow.data.files import Row, Rows, as_list, load_rows
from hybridflow.data.messages import media_keys
from hybridflow.data.row_schema import PLAIN_PROMPTS, PROMPT_HINT, complete_row, require_prompts
from hybridflow.errors import DataError
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.compose import describe
from hybridflow.rewards.dry_run import GROUND_TRUTH, choose_responses, dry_run
from hybridflow.rewards.early_checks import refuse_model
from hybridflow.rewards.labelled import (
    SHIPPED,
    Case,
    Counts,
    JudgedCase,
    as_data,
    classes_of,
    judge,
    own_cases,
    shipped_cases,
    suggestions,
    wilson,
)

logger = logging.getLogger(__name__)

GENERATE = "generate"
SHOWN = 100
"""Characters of a prompt and of a response in the table."""
MOST = 20
"""Wrong verdicts that are shown."""


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
        rows.refuse_media("no key names it", named=media_keys(data), read=True)
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


def show_cases(config: PPOConfig, which: str, *, as_json: bool) -> int:
    """Print how often the reward errs on labelled cases; status 1 where it errs or fails on one."""
    refuse_model(config.reward)
    reports: dict[str, dict[str, Any]] = {}
    status = 0
    for name, reward, cases in _chosen_cases(config.reward, which):
        with closing(build_reward_manager(reward, config.trainer.seed)) as manager:
            verdicts = judge(manager, cases)
        wrong = [one for one in verdicts if not one.agrees]
        status |= bool(wrong)
        undecided = len(cases) - len(verdicts)
        reports[name] = {"reward": describe(reward), "undecided": undecided, **as_data(verdicts)}
        if not as_json:
            title = f"{describe(reward)} on {len(verdicts)} cases"
            if undecided:
                title += f" ({undecided} more are not decided)"
            Console().print(_counts_table(title, verdicts))
            for one in wrong[:MOST]:
                _show_misjudged(one)
            if len(wrong) > MOST:
                print(f"and {len(wrong) - MOST} more, which --json lists")
    if as_json:
        print(json.dumps({"status": status, "cases": reports}))
    return status


def _chosen_cases(reward: RewardConfig, which: str) -> Iterator[tuple[str, RewardConfig, list[Case]]]:
    """Yield each set of cases with its name, and the reward that judges it: the configured one, if one is."""
    names = [which] if which in SHIPPED else list(SHIPPED)
    if which not in ("shipped", *SHIPPED):
        yield which, reward, own_cases(Path(which), reward)
        return
    is_chosen = bool(reward.terms or reward.custom_reward_function.path or reward.function != "auto")
    for name in names:
        yield name, reward if is_chosen else replace(reward, function=name), shipped_cases(name)


def _counts_table(title: str, verdicts: list[JudgedCase]) -> Table:
    rows = {**classes_of(verdicts), "all": Counts.of(verdicts)}
    heads = ["right answers", "refused", "rate (95 %)", "wrong answers", "taken", "rate (95 %)"]
    if rows["all"].failed:
        heads.append("failed")
    columns = [Column(head, justify="right", overflow="fold") for head in heads]
    table = Table("class", *columns, title=Text(title), title_justify="left")
    for kind, counts in rows.items():
        cells: list[object] = []
        for count, total in counts.rates().values():
            cells += [total, count, _rate(count, total)]
        if kind == "all":
            table.add_section()
        table.add_row(Text(kind), *map(str, [*cells, counts.failed][: len(heads)]))
    return table


def _rate(count: int, total: int) -> str:
    if total == 0:
        return "-"
    low, high = wilson(count, total)
    return f"{100 * count / total:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def _show_misjudged(one: JudgedCase) -> None:
    case = one.case
    got = "taken" if one.taken else "refused"
    if one.error:
        got = f"failed: {one.error.strip().splitlines()[-1]}"
    note = f"; {case.note}" if case.note else ""
    print(f"{case.place} ({case.kind}): wanted {'right' if case.right else 'wrong'}, got {got}{note}")
    response = case.response.replace("\n", " ↵ ")
    print(f"    truth    {_short(str(case.truth))}\n    response {_short(response)}")


def show_suggestions(run: Path) -> int:
    """Print a run's samples whose verdicts do not go together as JSON lines, each a case to label."""
    found = suggestions(run)
    for case in found:
        print(json.dumps(case, ensure_ascii=False))
    logger.info(
        "%d cases to label: set right to true or false, and judge them by reward-test --cases", len(found)
    )
    return 0
