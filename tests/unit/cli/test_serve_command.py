"""`hybridflow serve` before it serves: what it refuses, what its words mean, and what they cost."""

from __future__ import annotations

import importlib.util
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER
from hybridflow.checkpoint.sharded import save_shards
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.cli import serve
from hybridflow.cli.main import main, parser
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import save_config
from hybridflow.models.tiny import create_tiny_model
from hybridflow.rollout.server.build import ServeSettings


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    monkeypatch.delenv(serve.TOKEN_VARIABLE, raising=False)


def settings(stack: ExitStack, *words: str) -> ServeSettings:
    made = serve._settings(parser().parse_args(["serve", *words]), stack)
    assert isinstance(made, ServeSettings)
    return made


def test_words_become_settings() -> None:
    made = settings(
        ExitStack(),
        "models/my-model",
        "--device",
        "cuda:0,cuda:1",
        "--request-timeout",
        "0",
        "--max-body-mb",
        "0.5",
    )
    assert (made.model, made.name, made.devices) == ("models/my-model", "my-model", ("cuda:0", "cuda:1"))
    assert made.limits.deadline_s is None and made.limits.max_body_bytes == 2**19
    assert settings(ExitStack(), "org/name", "--device", "cpu", "--served-model-name", "x").name == "x"
    assert settings(ExitStack(), "org/name", "--device", "cpu", "--speculate").speculate
    assert not made.speculate


def test_a_checkpoint_is_made_a_folder_first(tmp_path: Path) -> None:
    tiny = create_tiny_model(tmp_path / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1)
    policy = build_policy(tiny, device="cpu", probe=False)
    tokenizer = load_tokenizer(tiny)

    def configuration(folder: Path) -> None:
        save_config(policy, folder)
        tokenizer.save_pretrained(folder)

    fill: dict[str, Any] = {
        ACTOR: lambda folder: save_shards(folder, {"model": policy.state_dict()}),
        f"{ACTOR}/{HF_FOLDER}": configuration,
    }
    step = CheckpointStore(tmp_path / "run").save(4, {}, folders=fill)
    for given in (step, step / ACTOR):
        with ExitStack() as stack:
            made = settings(stack, str(given), "--device", "cpu")
            assert made.name == Path(made.model).name == given.name
            assert build_policy(made.model, device="cpu").head.weight.equal(policy.head.weight)
        assert not Path(made.model).exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--host", "0.0.0.0"], "needs a token of at least 16 characters"),
        (["--api-key", ""], "the server's token is empty"),
        (["--port", "0"], "no folder"),
        (["--port", "-1"], "--port -1: wanted 1 to 65535"),
        (["--max-num-seqs", "0"], "--max-num-seqs 0: wanted at least 1"),
        (["--host", "192.0.2.1", "--api-key", "x" * 20], "cannot listen on 192.0.2.1:8000"),
    ],
)
def test_what_cannot_be_is_said_before_the_model_is_loaded(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", "--device", "cpu", *words]) == 1
    assert told in capsys.readouterr().err


def test_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["serve", "model"]) == 1
    assert (
        "needs fastapi and uvicorn, which is not installed: install the extra 'serve'"
        in capsys.readouterr().err
    )
