"""What cannot run is refused with the way out, what may surprise is noted: one table, refusals.yaml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from possible_run import problem, rows, table, written_out

from hybridflow.config import RUNS, PPOConfig, SFTConfig
from hybridflow.config.load import load_config, prepare_config
from hybridflow.config.relations import Relations, _conditions
from hybridflow.config.resolve import resolve
from hybridflow.config.tree import keys_of
from hybridflow.config.verl_keys import status
from hybridflow.errors import ConfigError

ROLES = "actor_rollout_ref"
SHORT = {
    "actor": f"{ROLES}.actor",
    "rollout": f"{ROLES}.rollout",
    "ref": f"{ROLES}.ref",
    "model": f"{ROLES}.model",
    "loss": f"{ROLES}.actor.policy_loss",
    "fsdp": f"{ROLES}.actor.fsdp_config",
    "estimator": "algorithm.adv_estimator",
    "correction": "algorithm.rollout_correction",
    "groups": "algorithm.filter_groups",
    "process": "reward.process_reward_model",
    "overlong": "reward.reward_kwargs.overlong_buffer_cfg",
}
TABLE = table("refusals.yaml")


@pytest.mark.parametrize(("overrides", "says"), rows(TABLE["refused"], SHORT))
def test_what_cannot_run_is_refused_with_the_way_out(
    base: list[str], overrides: list[str], says: list[str]
) -> None:
    message = problem(base, *overrides)
    assert [part for part in says if part not in message] == [], message


@pytest.mark.parametrize(("overrides", "says"), rows(TABLE["refused_supervised"], SHORT))
def test_supervised_runs_are_checked_too(tmp_path: Path, overrides: list[str], says: list[str]) -> None:
    base = ["model.path=org/name", f"trainer.default_local_dir={tmp_path}/run"]
    message = problem(base, *overrides, root=SFTConfig)
    assert [part for part in says if part not in message] == [], message


@pytest.mark.parametrize("override", written_out(TABLE["refused_of_verl"], SHORT).split())
def test_what_would_change_results_is_refused_with_a_reason(override: str) -> None:
    path, _, value = override.lstrip("+").partition("=")
    result = status(PPOConfig, path, yaml.safe_load(value))
    assert result.kind == "refused" and len(result.reason) > 5, result
    with pytest.raises(ConfigError, match=re.escape(path)):
        load_config(PPOConfig, [override])


@pytest.mark.parametrize(("overrides", "says"), rows(TABLE["noted"], SHORT))
def test_what_may_surprise_or_is_not_read_is_noted(
    base: list[str], overrides: list[str], says: list[str]
) -> None:
    notes = prepare_config(PPOConfig, [*base, *overrides]).notes
    assert all(any(part in note for note in notes) for part in says), notes


@pytest.mark.parametrize(("overrides", "says"), rows(TABLE["unnoted"], SHORT))
def test_what_runs_as_meant_has_no_note(base: list[str], overrides: list[str], says: list[str]) -> None:
    assert prepare_config(PPOConfig, [*base, *overrides]).notes == says


MISTAKES = rows(table("mistakes.yaml"), SHORT)


@pytest.mark.parametrize(("overrides", "says"), MISTAKES)
def test_all_mistakes_are_told_in_one_round_and_nothing_else(
    base: list[str], overrides: list[str], says: list[str]
) -> None:
    message = problem(base, *overrides)
    lines = message.splitlines()[1:]
    assert [part for part in says if not any(part in line for line in lines)] == [], message
    assert len(lines) == len(says), message


def test_mistakes_are_told_without_torch(base: list[str]) -> None:
    program = (
        "import json, sys\nfrom hybridflow.cli.main import main\n"
        "status = main(['train', *json.loads(sys.argv[1])])\n"
        "print(status, len(sys.modules), *{'torch', 'transformers'} & set(sys.modules))"
    )
    words = MISTAKES[0].values[0]
    command = [sys.executable, "-c", program, json.dumps([*base, *words])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    status, modules, *heavy = done.stdout.split()
    assert status == "1" and not heavy and int(modules) < 1500, done.stdout


@pytest.mark.parametrize("root", RUNS.values())
def test_each_relation_names_keys_that_there_are_and_defaults_keep_it(root: type) -> None:
    known = {path for each in RUNS.values() for path in keys_of(each)} | {"trainer.placement.rollout"}
    for info in keys_of(root).values():
        block = info.path.rpartition(".")[0]
        named = [(block, relation) for relation in info.relations]
        for place, relation in [*named, *info.readers]:
            paths = {each.path for each in _conditions(relation.other, place)}
            assert paths & known, f"{info.path}: {relation.other}"
            assert relation.why or relation.kind not in ("excludes", "needs", "surprises"), info.path
    assert list(Relations(resolve(root())[0]).problems({})) == []
