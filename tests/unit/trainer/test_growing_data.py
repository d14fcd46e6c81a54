"""Training data that grow by what a run does: whole runs, resumed ones, and what cannot be used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_trainer import build, metrics_of, ppo_config

from hybridflow.config import PPOConfig
from hybridflow.config.checks.notes import ppo_notes
from hybridflow.config.data import DataConfig, DatagenConfig
from hybridflow.config.trainer import TrainerConfig
from hybridflow.data.growing import GrowingPrompts
from hybridflow.errors import CheckpointError, ConfigError
from hybridflow.observability.progress import progress

MAKER = '''
from verl.utils.dataset.dynamicgen_dataset import AbstractDataGenerator

class Maker(AbstractDataGenerator):
    """Two rows after each step, whose words say what the step has scored; none after the second."""

    calls = 0

    def generate(self, dataset, batch):
        self.calls += 1
        if self.calls == 2:
            raise RuntimeError("no idea today")
        scores = (batch.batch["token_level_scores"] * batch.batch["response_mask"]).sum(-1)
        best = batch.non_tensor_batch["solution_str"][int(scores.argmax())]
        text = f"{len(dataset.rows)} {self.calls} {float(scores.sum()):.6f} {ascii(best)}"
        text = text[: self.config.options["most"]]
        row = {"data_source": "given", "reward_model": {"ground_truth": scores[0]}}
        return [{**row, "prompt": f"{text} {each}"} for each in "ab"] + [{**row, "prompt": "long " * 99}]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]
'''


def settings_of(folder: Path, maker: str = MAKER, rows: int = 9) -> list[str]:
    """Keys of a run of five steps of four prompts, whose data have nine rows at the start."""
    lines = [{"data_source": "given", "prompt": f"count to {place}", "answer": "x"} for place in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "maker.py").write_text(maker)
    return [
        "data.task.name=null",
        f"data.train_files=['{folder / 'rows.jsonl'}']",
        f"data.datagen={{path:'{folder / 'maker.py'}',name:Maker,options:{{most:20}}}}",
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=5",
        "trainer.save_freq=1",
    ]


def fit(model: Path, run: Path, *settings: str) -> tuple[list[list[str]], GrowingPrompts]:
    """The prompts of the steps that a run has trained, in their order, and its dataset at the end."""
    seen: list[list[str]] = []
    with build(ppo_config(model, run, *settings)) as trainer:
        taken = trainer.source.batches()

        def noted() -> Any:
            for prompts in taken:
                seen.append([prompt.row["raw_prompt"] for prompt in prompts])
                yield prompts

        trainer.source.batches = noted  # type: ignore[method-assign]
        trainer.fit()
        dataset = trainer.source.loader.dataset
    assert isinstance(dataset, GrowingPrompts)
    return seen, dataset


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, list[list[str]]]:
    folder = tmp_path_factory.mktemp("straight")
    seen, dataset = fit(model, folder / "run", *settings_of(folder))
    assert len(dataset) == 9 + 4 * 2 and dataset.num_given == 9
    return folder, seen


def test_the_next_epoch_has_what_the_last_one_made(straight: tuple[Path, list[list[str]]]) -> None:
    folder, seen = straight
    first, second = [*seen[0], *seen[1]], [*seen[2], *seen[3]]
    given = {f"count to {place}" for place in range(9)}
    assert set(first) <= given and len(set(first)) == 8, "rows of an epoch are those at its beginning"
    assert len({*second, *seen[4]} - given) >= 1, (
        "nine rows and two made: three of eleven are not of the file"
    )
    logged = metrics_of(folder / "run")
    assert [logged[step]["data/num_made_prompts"] for step in range(1, 6)] == [2, 2, 4, 6, 8]
    assert [logged[step]["data/num_datagen_failures"] for step in range(1, 6)] == [0, 1, 1, 1, 1]
    assert logged[5]["data/num_prompts"] == 17


@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_resumed_run_has_the_same_rows_in_the_same_order(
    done: int, straight: tuple[Path, list[list[str]]], model: Path, tmp_path: Path
) -> None:
    folder, seen = straight
    saved = folder / "run" / f"global_step_{done}"
    again = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path='{saved}'"]
    resumed, dataset = fit(model, tmp_path / "run", *settings_of(tmp_path), *again)
    assert resumed == seen[done:] and len(dataset) == 17
    one, other = metrics_of(folder / "run"), metrics_of(tmp_path / "run")
    for step in range(done + 1, 6):
        assert one[step] == other[step]


def test_a_checkpoint_whose_data_had_grown_wants_data_that_grow(
    straight: tuple[Path, list[list[str]]], model: Path, tmp_path: Path
) -> None:
    saved = straight[0] / "run" / "global_step_2"
    again = [
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path='{saved}'",
        "data.datagen={path:null,name:null}",
    ]
    config = ppo_config(model, tmp_path / "run", *settings_of(tmp_path), *again)
    with (
        pytest.raises(CheckpointError, match=r"had grown, and this run's do not grow: set data\.datagen"),
        build(config),
    ):
        pass


WRONG = {
    "nothing": ("return None", 0, ""),
    "no dicts": ("return [3]", 1, "'int' object is not iterable"),
    "an object": ("return [{'prompt': object()}]", 1, "a row holds a object: wanted texts"),
    "no prompt": (
        "return [{'data_source': 'given'}]",
        1,
        "1 of 1 rows of data.datagen: Maker.generate cannot",
    ),
    "another source": (
        "return [{'prompt': 'x', 'data_source': 'new'}]",
        1,
        "new is no data source of the rows at the start",
    ),
    "no source": ("return [{'prompt': 'x', 'answer': 'x'}]", 1, "the row has no data_source"),
    "an agent": (
        "return [{'prompt': 'x', 'answer': 'x', 'data_source': 'given', 'agent_name': 'new'}]",
        1,
        "new is no agent of the rows at the start",
    ),
    "no truth": (
        "return [{'prompt': 'x', 'data_source': 'given', 'reward_model': {}}]",
        1,
        "Maker.generate cannot be used; the first: row 0: ValueError: the row has no ground truth",
    ),
    "pictures": (
        "return [{'prompt': 'x', 'data_source': 'given', 'answer': 'x', 'images': ['a.png']}]",
        1,
        "the row has images, and the model reads text only",
    ),
    "too long": (
        "return [{'prompt': 'x ' * 99, 'data_source': 'given', 'answer': 'x'}]",
        0,
        "1 of 1 prompts of data.datagen",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_told_and_ends_no_run(
    case: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body, failures, told = WRONG[case]
    maker = f"class Maker:\n    def __init__(self, config): pass\n    def generate(self, dataset): {body}\n"
    settings = [*settings_of(tmp_path, maker), "trainer.total_training_steps=1", "trainer.test_freq=-1"]
    with caplog.at_level(logging.WARNING):
        _, dataset = fit(model, tmp_path / "run", *settings)
    assert len(dataset) == 9 and dataset.growth()["data/num_datagen_failures"] == failures
    assert told in caplog.text


def test_a_class_without_the_method_is_refused(model: Path, tmp_path: Path) -> None:
    maker = "class Maker:\n    def __init__(self, config): pass\n"
    with pytest.raises(ConfigError, match=r"data\.datagen: .*:Maker has no generate"):
        ppo_config(model, tmp_path / "run", *settings_of(tmp_path, maker))


def maker_of(*methods: str) -> str:
    """The source of a class of its own base, of which its source alone does not tell what it has."""
    body = "".join(f"    {method}\n" for method in methods)
    return f"import abc\nclass Maker(abc.ABC):\n    def __init__(self, config): self.calls = 0\n{body}"


def test_only_what_is_wrong_is_left_out(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = "{'prompt': 'x', 'data_source': 'given', 'answer': 'x', 'images': []}"
    maker = maker_of(f"def generate(self, dataset): return [{row}, {{**{row}, 'answer': None}}]")
    settings = [*settings_of(tmp_path, maker), "trainer.total_training_steps=1", "trainer.test_freq=-1"]
    with caplog.at_level(logging.WARNING):
        _, dataset = fit(model, tmp_path / "run", *settings)
    assert len(dataset) == 10 and dataset.growth()["data/num_datagen_failures"] == 0
    assert "1 of 2 rows of data.datagen: Maker.generate cannot be used; the first: row 1" in caplog.text


def test_rows_need_no_truth_where_a_row_of_the_file_has_none(model: Path, tmp_path: Path) -> None:
    maker = maker_of("def generate(self, dataset): return [{'prompt': 'x', 'data_source': 'given'}]")
    settings = [*settings_of(tmp_path, maker), "trainer.total_training_steps=1", "trainer.test_freq=-1"]
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"data_source": "given", "prompt": "count", "answer": null}\n')
    assert len(fit(model, tmp_path / "run", *settings)[1]) == 11


def test_an_own_estimator_that_reads_the_datas_answers_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def shown(response_mask, is_demonstration): ...\n")
    config = ppo_config(
        model, tmp_path / "run", *settings_of(tmp_path), f"algorithm.adv_estimator='{tmp_path}/own.py:shown'"
    )
    with (
        pytest.raises(ConfigError, match=r"this run learns from the data's own: leave data\.datagen out"),
        build(config),
    ):
        pass


def test_the_wait_for_the_class_has_a_name(model: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    maker = maker_of("def generate(self, dataset): dataset.note()")
    settings = [*settings_of(tmp_path, maker), "trainer.total_training_steps=1", "trainer.test_freq=-1"]
    with build(ppo_config(model, tmp_path / "run", *settings)) as trainer:
        trainer.source.loader.dataset.note = lambda: seen.append(progress.describe())  # type: ignore[attr-defined]
        trainer.fit()
    assert len(seen) == 1 and "data.sampler and data.datagen" in seen[0]


LOADED = {
    "None": (["generate = None"], "has no generate"),
    "async": (["async def generate(self, dataset): ..."], "it is async, and nothing awaits it"),
    "no dataset": (["def generate(self): ..."], r"got generate\(\), wanted def generate\(self, dataset\)"),
    "a state": (
        [
            "def generate(self, dataset): ...",
            "def state_dict(self): return {'seen': {1}}",
            "def load_state_dict(self, state): ...",
        ],
        "Maker.state_dict: cannot store /seen of type set",
    ),
}


@pytest.mark.parametrize("case", LOADED)
def test_a_class_that_cannot_be_used_is_refused_once_it_is_loaded(
    case: str, model: Path, tmp_path: Path
) -> None:
    methods, told = LOADED[case]
    source = maker_of(*methods).replace("class Maker", "class Other") + "\nMaker = Other\n"
    config = ppo_config(model, tmp_path / "run", *settings_of(tmp_path, source))
    with pytest.raises(ConfigError, match=told.replace("Maker", "Other")), build(config):
        pass


def test_a_state_that_can_no_longer_be_stored_names_the_class(model: Path, tmp_path: Path) -> None:
    maker = maker_of(
        "def generate(self, dataset): self.calls += 1",
        "def state_dict(self): return {'calls': self.calls, 'lock': {1} if self.calls else None}",
        "def load_state_dict(self, state): ...",
    )
    with pytest.raises(
        ConfigError, match=r"data\.datagen: Maker\.state_dict: cannot store /lock of type set"
    ):
        fit(model, tmp_path / "run", *settings_of(tmp_path, maker))


def test_the_class_of_the_page_makes_rows(model: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "growing_data.md").read_text(encoding="utf-8")
    (tmp_path / "harder.py").write_text(page.split("```python\n")[1].split("```")[0])
    named = [f"data.datagen.path='{tmp_path / 'harder.py'}:Harder'", "data.datagen.options.most=3"]
    settings = [
        *named,
        "algorithm.adv_estimator=grpo",
        "trainer.total_training_steps=1",
        "trainer.test_freq=-1",
    ]
    _, dataset = fit(model, tmp_path / "run", *settings)
    assert dataset.growth() == {
        "data/num_prompts": 67.0,
        "data/num_made_prompts": 3.0,
        "data/num_datagen_failures": 0.0,
    }
    assert dataset[66].row["raw_prompt"][0]["content"].endswith(" + 1 = ?") and dataset[66].index == 66


def test_a_run_of_one_epoch_is_told_that_nothing_joins_it() -> None:
    for epochs, told in ((1, True), (2, False)):
        config = PPOConfig(
            data=DataConfig(datagen=DatagenConfig(path="grow.py", name="Maker")),
            trainer=TrainerConfig(total_epochs=epochs),
        )
        assert any("join the next epoch" in line for line in ppo_notes(config, set())) == told
