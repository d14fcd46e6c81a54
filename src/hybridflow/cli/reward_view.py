"""How `hybridflow reward-test` shows its rows."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.config import PPOConfig
from hybridflow.data.build import build_prompt_data
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.rewards.build import build_reward_manager
from hybridflow.rewards.dry_run import dry_run


def show_reward_test(config: PPOConfig, *, rows: int, response: str) -> int:
    """Score the first rows and print them; status 1 where a row failed."""
    tokenizer = load_tokenizer(
        config.data.tokenizer or str(config.actor_rollout_ref.model.path), config.data.trust_remote_code
    )
    few_rows_will_do = replace(config.data, train_batch_size=1)
    data = build_prompt_data(few_rows_will_do, tokenizer, config.trainer.seed)
    assert data.train_loader is not None, "the checks ask for training data"
    dataset = data.train_loader.dataset
    prompts = [dataset[index].row for index in range(min(rows, len(dataset)))]
    table = Table(
        "row", "source", "response", "score", "seconds", "error", title="Rewards", title_justify="left"
    )
    with closing(build_reward_manager(config.reward, config.trainer.seed)) as manager:
        results = dry_run(
            manager,
            prompts,
            config.reward,
            response=response,
            num_rows=rows,
            reward_fn_key=config.data.reward_fn_key,
        )
    for result in results:
        error = str(result["error"] or "")
        score = "" if error else f"{result['score']:g}"
        table.add_row(
            str(result["row"]),
            str(result["data_source"]),
            Text(str(result["response"])[:60]),
            score,
            f"{result['seconds']:.3f}",
            Text(error),
        )
    Console().print(table)
    failed = sum(bool(result["error"]) for result in results)
    print(f"{len(results) - failed} of {len(results)} rows scored" + (f", {failed} failed" if failed else ""))
    return 1 if failed else 0
