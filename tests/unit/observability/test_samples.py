from __future__ import annotations

import base64
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridflow.errors import ConfigError
from hybridflow.observability import samples
from hybridflow.observability.logging_setup import setup_logging
from hybridflow.observability.samples import SampleWriter, rollout_columns, sample_rows
from hybridflow.protocol import DataProto
from hybridflow.protocol.prompt import MEDIA, Medium


def decode(ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in ids)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


@pytest.fixture
def batch() -> DataProto:
    """Two rows: '1+1=' → '2.' and '9=' → '9' with padding on the left and on the right."""
    pad = 0
    tensors = {
        "prompts": torch.tensor([ids("1+1="), [pad, pad, *ids("9=")]]),
        "responses": torch.tensor([ids("2."), [*ids("9"), pad]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]).bool(),
        "response_mask": torch.tensor([[1, 1], [1, 0]]).bool(),
        "rollout_log_probs": torch.tensor([[-0.123456789, -2.0], [-0.5, 7.0]]),
        "advantages": torch.tensor([[1.0, 1.0], [-1.0, 0.0]]),
        "token_level_scores": torch.tensor([[0.0, 1.0], [0.25, 0.0]]),
        "row_id": torch.tensor([4, 5]),
    }
    columns = {
        "uid": ["a", "b"],
        "finish_reason": ["stop", "length"],
        "data_source": ["sums", "sums"],
        "reward_model": [{"style": "rule", "ground_truth": "2"}, {"ground_truth": 9}],
        "extra_info": [{}, {"x": 1}],
        "acc": [np.float32(1.0), 0.5],
    }
    arrays = {name: np.array(values, dtype=object) for name, values in columns.items()}
    return DataProto.from_dict(tensors, arrays)


def test_rows_hold_text_scores_and_no_padding(batch: DataProto) -> None:
    first, second = sample_rows(batch, decode)
    assert first == {
        "row_id": 4,
        "prompt": "1+1=",
        "response": "2.",
        "num_tokens": 2,
        "score": 1.0,
        "uid": "a",
        "finish_reason": "stop",
        "data_source": "sums",
        "ground_truth": "2",
        "acc": 1.0,
    }
    assert second["extra_info"] == {"x": 1} and "extra_info" not in first
    assert list(second)[-2:] == ["uid", "row_id"], "what helps nobody to read comes last"
    assert list(second)[:4] == ["prompt", "response", "num_tokens", "score"]
    assert (second["prompt"], second["response"], second["score"], second["ground_truth"]) == (
        "9=",
        "9",
        0.25,
        9,
    )


def test_rows_hold_the_columns_that_scoring_reads(batch: DataProto) -> None:
    """In a run the truth is a column of its own, not inside `reward_model`."""
    scored = batch.select(None, ["uid", "extra_info", "data_source"])
    scored |= DataProto.from_dict({}, {"ground_truth": np.array(["2", "9"], dtype=object)})
    assert [row["ground_truth"] for row in sample_rows(scored, decode)] == ["2", "9"]


def test_token_level_columns_are_as_long_as_the_response(batch: DataProto) -> None:
    first, second = sample_rows(batch, decode, token_level=True)
    assert first["tokens"] == {
        "text": ["2", "."],
        "rollout_log_probs": [-0.123457, -2.0],
        "advantages": [1.0, 1.0],
        "response_mask": [1, 1],
    }
    assert second["tokens"] == {
        "text": ["9"],
        "rollout_log_probs": [-0.5],
        "advantages": [-1.0],
        "response_mask": [1],
    }


def test_rows_of_an_agent_have_its_conversation_once_and_its_score(batch: DataProto) -> None:
    messages = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2."}]
    info = [{"messages": messages, "num_turns": 2}, {"messages": messages, "num_turns": 2}]
    tensors = {"trajectory_id": torch.tensor([7, 7]), "lineage": torch.tensor([0, 1])}
    batch.non_tensor_batch["extra_info"] = np.array(info, dtype=object)
    first, second = sample_rows(batch | DataProto.from_dict(tensors), decode)
    assert first["messages"] == messages and "messages" not in second
    assert first["extra_info"] == second["extra_info"] == {"num_turns": 2}
    assert [(row["trajectory_id"], row["lineage"]) for row in (first, second)] == [(7, 0), (7, 1)]
    assert first["score"] == second["score"] == 1.25, "the score is the trajectory's, wherever it lies"


def test_writer_makes_one_file_a_step_and_replaces_it(batch: DataProto, tmp_path: Path) -> None:
    writer = SampleWriter(tmp_path / "samples")
    writer.write(sample_rows(batch, decode), 3)
    path = writer.write(sample_rows(batch, decode, max_rows=1), 3)
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["step"] == 3 and json.loads(line)["uid"] == "a"
    assert [file.name for file in writer.folder.iterdir()] == ["3.jsonl"]


def test_writer_holds_numpy_values(tmp_path: Path) -> None:
    path = SampleWriter(tmp_path).write(
        [{"a": np.float32(0.5), "b": np.arange(2), "c": torch.tensor(1), "d": Path("x")}], 1
    )
    assert json.loads(path.read_text()) == {"step": 1, "a": 0.5, "b": [0, 1], "c": 1, "d": "x"}


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="sample folder"):
        SampleWriter(tmp_path / "file" / "samples")


def test_setup_logging_replaces_its_handler_and_knows_its_levels() -> None:
    root, ours = logging.getLogger(), logging.getLogger("hybridflow")
    before, level, our_level = list(root.handlers), root.level, ours.level
    try:
        setup_logging("debug", rich=True)
        setup_logging("warning", rich=False)
        (handler,) = [h for h in root.handlers if h not in before]
        assert type(handler) is logging.StreamHandler and ours.getEffectiveLevel() == logging.WARNING
        with pytest.raises(ConfigError, match="'loud' is unknown"):
            setup_logging("loud")
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        ours.setLevel(our_level)
        logging.captureWarnings(False)


def test_log_lines_go_to_stderr_and_third_parties_stay_quiet() -> None:
    code = (
        "import logging; from hybridflow.observability.logging_setup import setup_logging; "
        "setup_logging('INFO');"
        "logging.getLogger('hybridflow.x').info('ours'); logging.getLogger('transformers').warning('theirs')"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRANSFORMERS", "HF_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert "INFO hybridflow.x: ours" in done.stderr and "theirs" not in done.stderr and done.stdout == ""


def test_a_fresh_run_does_not_show_an_earlier_ones_samples(tmp_path: Path) -> None:
    for step in (0, 5, 90):
        SampleWriter(tmp_path).write([{"prompt": "p"}], step)
    (tmp_path / "notes.jsonl").write_text("a user's own")
    SampleWriter(tmp_path, keep_to=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.jsonl", "5.jsonl", "notes.jsonl"]
    SampleWriter(tmp_path, keep_to=-1)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.jsonl"]


def test_a_row_has_its_pictures_and_one_placeholder_for_each(batch: DataProto) -> None:
    small = Medium(1, 2, "a" * 64, shown=b"\x89PNG and more", kind="video")
    media = [(small, Medium(3, 1, "b", shown=b"\xff\xd8")), (Medium(0, 1, "c"),)]
    with_media = batch.union(DataProto.from_dict({}, {MEDIA: media}))
    first, second = sample_rows(with_media, decode)
    assert first["prompt"] == "1+=" and second["prompt"] == "9="
    assert first["media"] == [
        {
            "kind": "video",
            "placeholder": "+",
            "tokens": 2,
            "digest": "a" * 16,
            "picture": "data:image/png;base64," + base64.b64encode(b"\x89PNG and more").decode(),
        },
        {
            "kind": "image",
            "placeholder": "=",
            "tokens": 1,
            "digest": "b",
            "picture": "data:image/jpeg;base64,/9g=",
        },
    ]
    assert second["media"] == [{"kind": "image", "placeholder": "9", "tokens": 1, "digest": "c"}]


def test_a_file_has_each_picture_once_and_no_more_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "PICTURE_BYTES", 10)
    rows = [
        {"media": [{"digest": name, "picture": f"pic {name}"}]} for name in ("a", "a", "long one", "b", "c")
    ]
    lines = SampleWriter(tmp_path).write([*rows, {"prompt": "x"}], 1).read_text().splitlines()
    kept = [[medium.get("picture") for medium in json.loads(line).get("media", [])] for line in lines]
    assert kept == [["pic a"], [None], [None], ["pic b"], [None], []]
    assert rows[1]["media"][0]["picture"] == "pic a", "the caller's rows stay as they are"


def test_numbers_of_all_rollouts_have_no_texts_and_one_key_a_prompt(batch: DataProto) -> None:
    columns = rollout_columns(batch)
    assert all(len(values) == len(batch) for values in columns.values())
    rows = sample_rows(batch, decode)
    assert columns["score"] == [row["score"] for row in rows]
    assert columns["num_tokens"] == [row["num_tokens"] for row in rows]
    assert columns["uid"] == [row["uid"] for row in rows]
    prompts = [row["prompt"] for row in rows]
    assert (columns["key"][0] == columns["key"][1]) == (prompts[0] == prompts[1])
    json.dumps(columns)
