"""A file of responses: the rows of the data with a column of the answers to each, written and scored.

prompts, answers ──write_responses──► FILE.parquet or .jsonl ──score_file──► results, by any reward
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hybridflow.config import PPOConfig
from hybridflow.data.files import PARQUET, as_list, load_rows
from hybridflow.data.row_schema import source_of
from hybridflow.errors import DataError
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.early_checks import check_reward, refuse_model
from hybridflow.trainer.evaluation.results import (
    Answer,
    AnswerScores,
    ScoredAnswer,
    check_identity,
    summarise,
    write_results,
)
from hybridflow.trainer.run_folder import RunFolder

RESPONSES = "responses"
"""Column of the responses to a row: a list of texts, with null for one that failed."""
REWARD_MODEL = "reward_model"


def write_responses(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as parquet or, under any other name, as JSON lines. DataError where parquet cannot hold
    their values.
    """
    if path.suffix.lower() not in PARQUET:
        lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
        path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
        return
    try:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    except pa.ArrowException as error:
        raise DataError(
            f"{path}: a column has values of different kinds, which parquet cannot hold ({error}): give a "
            "name that ends in .jsonl"
        ) from error


def score_file(
    config: PPOConfig, *, response_key: str = RESPONSES, truth_key: str = REWARD_MODEL
) -> dict[str, Any]:
    """Score the responses in the files `data.val_files` by the configured reward, write the results into
    `trainer.default_local_dir` and return them; no model is needed.

    `response_key` names the column of responses, a text or a list of them; `truth_key` that of an object with
    `ground_truth`. Raises DataError for a missing column or another kind of value, ConfigError where the
    folder holds something else.
    """
    check_reward(config, [])
    refuse_model(config.reward)
    folder = RunFolder(config.trainer.default_local_dir)
    with folder.held():
        check_identity(folder.path, {"files": as_list(config.data.val_files), "column": response_key})
        rows = _score(config, response_key, truth_key)
        n = max(row.answer.sample for row in rows) + 1
        results = summarise(rows, n=n, seed=config.trainer.seed)
        write_results(folder.path, results, rows, 0)
    return results


def _score(config: PPOConfig, response_key: str, truth_key: str) -> list[ScoredAnswer]:
    rows = load_rows(as_list(config.data.val_files), config.data.cache_dir)
    rows.require(response_key, hint="name the column of responses")
    with (
        closing(build_reward_manager(config.reward, config.trainer.seed)) as manager,
        manager.open() as session,
    ):
        scores = AnswerScores(session)
        for number, row in enumerate(rows):
            responses = row[response_key]
            if isinstance(responses, str):
                responses = [responses]
            if (
                not responses
                or not isinstance(responses, list)
                or not all(isinstance(each, str | None) for each in responses)
            ):
                raise DataError(
                    f"{rows.source}, row {number}: {response_key} is {type(responses).__name__}, wanted a "
                    "text or a list of texts"
                )
            truth = row.get(truth_key) or {}
            extra_info = row.get("extra_info") or {}
            if not isinstance(truth, Mapping) or not isinstance(extra_info, Mapping):
                raise DataError(
                    f"{rows.source}, row {number}: {truth_key} is {type(truth).__name__} and extra_info "
                    f"{type(extra_info).__name__}, wanted objects: {truth_key} with ground_truth"
                )
            prompt = row.get(config.data.prompt_key)
            question = json.dumps(prompt, ensure_ascii=False, default=str)
            for sample, response in enumerate(responses):
                failed = "" if response is not None else "missing"
                answer = Answer(number, sample, question, response or "", "stop", 0, failed=failed)
                source = source_of(row, config.data)
                scores.add(answer, prompt, source, truth.get("ground_truth"), extra_info)
        return scores.result()
