"""Uploads through the hub's real client to a hub of this test, which keeps what it is sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hybridflow.checkpoint.layout import ACTOR, HF_FOLDER
from hybridflow.checkpoint.sharded import save_shards
from hybridflow.checkpoint.store import CheckpointStore
from hybridflow.cli.main import main
from hybridflow.data.remote import HubUpload
from hybridflow.data.tokenizer import load_tokenizer
from hybridflow.errors import ConfigError
from hybridflow.models.files.build import build_policy
from hybridflow.models.files.export import save_config
from hybridflow.models.tiny import create_tiny_model

RIGHT = "hf_right"
READING = "hf_reading"


class Hub(ThreadingHTTPServer):
    """A hub that knows one token."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repos: dict[str, bool] = {}
        """Whether each repository is private."""
        self.files: dict[str, bytes] = {}
        self.refuses_commits = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.headers["Authorization"] not in (f"Bearer {RIGHT}", f"Bearer {READING}"):
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/whoami-v2":
            role = "read" if READING in self.headers["Authorization"] else "write"
            self._answer(200, {"name": "me", "type": "user", "auth": {"accessToken": {"role": role}}})
        else:
            repo = self.path.removeprefix("/api/models/").partition("/revision")[0].partition("?")[0]
            if repo in self.server.repos:
                self._answer(200, {"id": repo, "private": self.server.repos[repo], "siblings": []})
            else:
                self._answer(404, {"error": "Repository not found"}, code="RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}"
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            self.server.repos.setdefault(repo, private)
            self._answer(200, {"url": f"{self.server.address}/{repo}"})
        elif "/preupload/" in self.path:
            files = [
                {"path": each["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for each in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path and self.server.refuses_commits:
            self._answer(403, {"error": "storage limit reached"})
        else:
            for entry in map(json.loads, body.splitlines()):
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"{self.server.address}/me/model/commit/abc"
            self._answer(200, {"commitUrl": url, "commitOid": "abc", "success": True})

    def _answer(self, status: int, content: dict[str, Any], code: str = "") -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", RIGHT)
        # the client reads HF_HUB_OFFLINE when it is imported, and this hub is in this process
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()
        thread.join()


def test_a_folder_arrives_byte_for_byte(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    contents = {"config.json": b"{}", "part/model.safetensors": bytes(range(256)) * 40}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    upload = HubUpload("me/model", private=True)
    upload.check()
    assert upload.send(tmp_path) == f"{hub.address}/me/model/commit/abc"
    assert hub.files == contents and hub.repos == {"me/model": True}
    upload.check()  # the repository exists by now


def test_uploads_that_cannot_be_are_refused_before_anything_is_made(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.repos["me/public"] = False
    HubUpload("me/public").check()
    with pytest.raises(ConfigError, match="me/public exists and is public"):
        HubUpload("me/public", private=True).check()
    for name in ("model", "me/model/more", "me/mo del"):
        with pytest.raises(ConfigError, match="wanted OWNER/NAME"):
            HubUpload(name).check()
    monkeypatch.setenv("OTHER", "hf_wrong")
    with pytest.raises(ConfigError, match="does not take the token of OTHER"):
        HubUpload("me/model", token_env="OTHER").check()
    monkeypatch.setenv("OTHER", READING)
    with pytest.raises(ConfigError, match="the token of OTHER may only read what me has"):
        HubUpload("me/model", token_env="OTHER").check()
    with pytest.raises(ConfigError, match="needs a token: set NOTHING"):
        HubUpload("me/model", token_env="NOTHING").check()
    assert set(hub.repos) == {"me/public"}


def test_a_failed_upload_says_how_to_try_again(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    hub.refuses_commits = True
    with pytest.raises(ConfigError) as failed:
        HubUpload("me/model", private=True).send(tmp_path)
    assert f"try again with `hf upload me/model {tmp_path} --private`" in str(failed.value)
    assert (tmp_path / "config.json").exists()


def checkpoint(folder: Path) -> Path:
    model = create_tiny_model(folder / "tiny", hidden=32, intermediate=64, heads=2, kv_heads=1)
    policy = build_policy(model, device="cpu", dtype="float32", probe=False)
    tokenizer = load_tokenizer(str(model))

    def configuration(into: Path) -> None:
        save_config(policy, into)
        tokenizer.save_pretrained(into)

    fill = {
        ACTOR: lambda into: save_shards(into, {"model": policy.state_dict()}),
        f"{ACTOR}/{HF_FOLDER}": configuration,
    }
    return CheckpointStore(folder / "run").save(4, {}, folders=fill)


def test_merge_uploads_what_it_has_written(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = str(checkpoint(tmp_path))
    target = tmp_path / "merged"
    assert main(["merge", step, str(target), "--private"]) == 1
    assert "give --upload OWNER/NAME too" in capsys.readouterr().err
    monkeypatch.setenv("OTHER", "hf_wrong")
    assert main(["merge", step, str(target), "--upload", "me/model", "--token-env", "OTHER"]) == 1
    assert not target.exists(), "refused before the merge"
    assert main(["merge", step, str(target), "--upload", "me/model", "--private"]) == 0
    written = {
        str(path.relative_to(target)): path.read_bytes() for path in target.rglob("*") if path.is_file()
    }
    assert hub.files == written and "model.safetensors" in written
