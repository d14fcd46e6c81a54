"""The preparation scripts on a local folder: their rows can be trained on, and mistakes are said."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from hybridflow.config.data import DataConfig
from hybridflow.data.files import load_rows
from hybridflow.data.prompts import PromptDataset
from hybridflow.data.tokenizer import load_tokenizer
from picture_models import picture_model, squares

SCRIPTS = Path(__file__).parents[3] / "examples" / "data_preprocess"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in this process, as the command would; a process of its own imports for seconds."""
    said = io.StringIO()
    status = 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", [script, *arguments])
        patch.syspath_prepend(str(SCRIPTS))
        try:
            runpy.run_path(str(SCRIPTS / script), run_name="__main__")
        except SystemExit as ended:
            status = 1 if isinstance(ended.code, str) else int(ended.code or 0)
            said.write(ended.code if isinstance(ended.code, str) else "")
    return subprocess.CompletedProcess([script], status, stderr=said.getvalue())


def test_gsm8k_from_a_local_folder(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    raw = [
        {"question": "How many?", "answer": "2 + 2\n#### 1,234"},
        {"question": "And?", "answer": "#### -7."},
    ]
    (tmp_path / "raw" / "main").mkdir(parents=True)
    for split in ("train", "test"):
        pq.write_table(
            pa.Table.from_pylist(raw), tmp_path / "raw" / "main" / f"{split}-00000-of-00001.parquet"
        )
    words = ("--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path / "out"))
    done = run("gsm8k.py", *words, "--hdfs_dir", f"file://{tmp_path}/there/gsm8k")
    assert done.returncode == 0, done.stderr
    for name in ("train.parquet", "test.parquet"):
        assert (tmp_path / "there/gsm8k" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    refused = run("gsm8k.py", *words, "--hdfs_dir", "nowhere://a")
    assert refused.returncode == 1
    assert "is written, but not copied to --hdfs_dir nowhere://a" in refused.stderr
    dataset = PromptDataset(load_rows(str(tmp_path / "out" / "train.parquet")), characters, DataConfig())
    assert [item.row["reward_model"]["ground_truth"] for item in dataset] == ["1234", "-7"]
    assert [item.index for item in dataset] == [0, 1] and dataset[0].row["extra_info"]["split"] == "train"
    assert dataset[0].row["data_source"] == "openai/gsm8k"
    assert "How many?" in characters.decode(dataset[0].prompt_token_ids)


def test_geometry_has_its_pictures(tmp_path: Path) -> None:
    file = io.BytesIO()
    squares((255, 0, 0)).save(file, "PNG")
    raw = [{"problem": "<image>Find x.", "images": [{"bytes": file.getvalue(), "path": "a"}], "answer": "3"}]
    for split in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(raw), tmp_path / f"{split}.parquet")
    words = ("--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out"))
    done = run("geo3k.py", *words)
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(picture_model())
    (item,) = PromptDataset(load_rows(str(tmp_path / "out" / "train.parquet")), tokenizer, DataConfig())
    assert len(item.media) == 1 and item.row["data_source"] == "hiyouga/geometry3k"
    assert item.row["reward_model"]["ground_truth"] == "3"


def test_math_from_a_local_folder(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    solutions = [
        r"so $\boxed{\frac{1}{2}}$.",
        r"first \boxed{3}, then $\boxed 5$",
        r"\boxed{\left\{1, 2\right.}",
    ]
    for split in ("train", "test"):
        lines = [
            json.dumps({"problem": "Find x.", "solution": solution, "level": "Level 1"})
            for solution in solutions
        ]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    done = run(
        "math_dataset.py", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out")
    )
    assert done.returncode == 0, done.stderr
    dataset = PromptDataset(load_rows(str(tmp_path / "out" / "test.parquet")), characters, DataConfig())
    assert [item.row["reward_model"]["ground_truth"] for item in dataset] == [
        r"\frac{1}{2}",
        "5",
        r"\left\{1, 2\right.",
    ]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no train*.parquet, .jsonl or .json"),
        (
            {"train.jsonl": '{"question": "a"}\n'},
            "row 0 of train has no column 'answer'; its columns: question",
        ),
        (
            {"train.jsonl": '{"question": "a", "answer": "5"}\n'},
            "row 0 of train: no '#### number' in the answer '5'",
        ),
        ({"train.jsonl": "{"}, "train.jsonl, line 1: not JSON"),
    ],
)
def test_mistakes_end_in_one_line(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    done = run("gsm8k.py", "--local_dataset_path", str(tmp_path), "--local_save_dir", str(tmp_path / "out"))
    assert done.returncode == 1 and said in done.stderr and "Traceback" not in done.stderr


def test_rows_of_agents_from_local_folders(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    """Each script writes rows that a run reads, with what its tools and users need."""
    question = {"question": "How many?", "answer": "#### 1,234"}
    dapo = {
        "prompt": [
            {"role": "user", "content": "Solve the following math problem step by step.\n\nFind x.\n\nAnd y."}
        ],
        "reward_model": {"ground_truth": "34"},
    }
    search = {"question": "Who?", "golden_answers": ["Ada", "Lovelace"], "data_source": "nq"}
    talk = {
        "prompt": [{"role": "user", "content": "Help."}],
        "single_turn_prompt": "2 + 2?",
        "single_turn_completion": "4",
    }
    raw = {
        "gsm8k_multiturn_w_tool.py": ([question], [question]),
        "gsm8k_tool_agent_loop.py": ([question], [question]),
        "dapo_math.py": ([dapo, dapo], [{"Problem": "Find z.", "Answer": 7}]),
        "search_r1.py": ([search], [search]),
        "collabllm.py": ([talk, talk, {**talk, "prompt": dapo["prompt"]}], [{**talk, "prompt": []}]),
    }
    written: dict[str, list[dict[str, Any]]] = {}
    for script, splits in raw.items():
        folder = tmp_path / script
        folder.mkdir()
        for split, rows in zip(("train", "test"), splits):
            (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        done = run(script, "--local_dataset_path", str(folder), "--local_save_dir", str(folder / "out"))
        assert done.returncode == 0, done.stderr
        loaded = load_rows([str(folder / "out" / f"{split}.parquet") for split in ("train", "test")])
        written[script] = [item.row for item in PromptDataset(loaded, characters, DataConfig())]

    for script, agent in (("gsm8k_multiturn_w_tool.py", None), ("gsm8k_tool_agent_loop.py", "tool_agent")):
        row = written[script][0]
        assert row.get("agent_name") == agent and row["data_source"] == "openai/gsm8k"
        create = row["extra_info"]["tools_kwargs"]["calc_gsm8k_reward"]["create_kwargs"]
        assert create == {"ground_truth": "1234"}
        assert row["extra_info"]["interaction_kwargs"]["name"] == "gsm8k"
    train, test = written["dapo_math.py"]
    assert train["reward_model"]["ground_truth"] == "34" and test["reward_model"]["ground_truth"] == "7"
    assert train["raw_prompt"][0]["content"].startswith("Find x.\n\nAnd y.\n\nPut the final answer")
    row = written["search_r1.py"][0]
    assert list(row["reward_model"]["ground_truth"]["target"]) == ["Ada", "Lovelace"]
    assert row["data_source"] == "searchR1_nq" and row["agent_name"] == "tool_agent"
    assert len(written["collabllm.py"]) == 3, "a prompt is there once"
    user = written["collabllm.py"][0]["extra_info"]["interaction_kwargs"]
    assert user == {
        "name": "collabllm",
        "single_turn_prompt": "2 + 2?",
        "task_desc": "solving math problems",
    }


def test_preferences_from_a_local_folder(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    pair = {"chosen": "\n\nHuman: Hi\n\nAssistant: Yes", "rejected": "\n\nHuman: Hi\n\nAssistant: No"}
    (tmp_path / "raw").mkdir()
    for split in ("train", "test"):
        rows = [pair, {"chosen": "no transcript", "rejected": ""}]
        (tmp_path / "raw" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = ("--local_dataset_path", str(tmp_path / "raw"), "--local_save_dir", str(tmp_path / "out"))
    done = run("preferences.py", "--dataset", "hh_rlhf", *places)
    assert done.returncode == 0, done.stderr
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    found = {
        part: load_rows(str(tmp_path / "out" / part / "train.parquet"))[:] for part in ("sft", "rm", "rl")
    }
    assert found["sft"] == [{"messages": talk}]
    assert found["rm"] == [{"chosen": talk, "rejected": [talk[0], {"role": "assistant", "content": "No"}]}]
    assert [row["prompt"] for row in found["rl"]] == [talk[:1]]
    assert (
        len(PromptDataset(load_rows(str(tmp_path / "out" / "rl" / "test.parquet")), characters, DataConfig()))
        == 1
    )


def test_further_data_sets_from_local_folders(tmp_path: Path, characters: PreTrainedTokenizerFast) -> None:
    hellaswag = {
        "activity_label": "Cooking",
        "ctx_a": "Eggs [title] Heat a pan.",
        "ctx_b": "then you",
        "endings": ["sleep.", "fry an egg. [step] Eat.", "fly.", "sing."],
        "label": "1",
    }
    aime = [{"Question": "Find x.", "Answer": "025", "Year": year} for year in (2023, 2024)]
    raw: dict[str, list[dict[str, Any]]] = {
        "gsm8k_sft.py": [{"question": "How many?", "answer": "2 + 2\n#### 4"}],
        "hellaswag.py": [hellaswag],
        "countdown.py": [{"nums": [44, 19, 35], "target": 98}],
        "aime.py": aime,
    }
    for script, rows in raw.items():
        folder = tmp_path / script
        folder.mkdir()
        for split in ("train", "test"):
            (folder / f"{split}.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        done = run(script, "--local_dataset_path", str(folder), "--local_save_dir", str(folder / "out"))
        assert done.returncode == 0, done.stderr

    def train(script: str) -> Any:
        return load_rows(str(tmp_path / script / "out" / "train.parquet"))

    question, answer = train("gsm8k_sft.py")[0]["messages"]
    assert "How many?" in question["content"] and answer["content"] == "2 + 2\n#### 4"
    for script in ("hellaswag.py", "countdown.py", "aime.py"):
        assert len(PromptDataset(train(script), characters, DataConfig())) == 1, script
    choice = train("hellaswag.py")[0]
    assert choice["reward_model"]["ground_truth"] == "B"
    assert (
        "Cooking: Eggs. Heat a pan. Then you\n\nA. sleep.\nB. fry an egg. Eat."
        in choice["prompt"][0]["content"]
    )
    assert train("aime.py")[0]["reward_model"]["ground_truth"] == "25"
    assert len(load_rows(str(tmp_path / "aime.py" / "out" / "test.parquet"))) == 2


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("so <answer>44 + 19 + 35</answer>", 1.0),
        ("<answer>1</answer> no: <answer>(44 + 19) + 35</answer>", 1.0),
        ("<answer>44 + 19</answer>", 0.1),
        ("<answer>49 * 2</answer>", 0.1),
        ("<answer>44 / (19 - 19) + 35</answer>", 0.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>9 ** 9 ** 9</answer>", 0.0),
        ("98", 0.0),
    ],
)
def test_reward_of_countdown(text: str, score: float) -> None:
    reward = runpy.run_path(str(SCRIPTS.parent / "rewards" / "countdown.py"))["compute_score"]
    assert reward("countdown", text, {"target": 98, "numbers": [44, 19, 35]}) == score


def test_reward_of_choices() -> None:
    reward = runpy.run_path(str(SCRIPTS.parent / "rewards" / "choice.py"))["compute_score"]
    texts = ["<answer>B</answer>", "<answer>A</answer><answer> B. egg</answer>", "<answer>A</answer>", "B"]
    assert [reward("Rowan/hellaswag", text, "B") for text in texts] == [1.0, 1.0, 0.0, 0.0]
