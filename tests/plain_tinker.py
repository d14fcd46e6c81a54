"""A client of the plain wire: JSON, and messages by number of field, without Tinker's package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import numpy as np
import torch
from torch import Tensor

from hybridflow.tinker.wire import Fields, bytes_field, double_field, number_field, read_fields

KEY = "tml-a-key-for-tests"
Row = tuple[Sequence[int], Mapping[str, Any]]
"""Tokens of a row, and what the loss reads of it."""


def tensor_message(values: Any) -> bytes:
    array = np.asarray(values)
    kind = 2 if array.dtype.kind in "iu" else 1
    data = array.astype("<i8" if kind == 2 else "<f4").tobytes()
    return (
        bytes_field(1, data) + number_field(3, kind) + b"".join(number_field(4, size) for size in array.shape)
    )


def row_message(tokens: Sequence[int], inputs: Mapping[str, Any]) -> bytes:
    chunk = bytes_field(1, bytes_field(1, np.asarray(tokens, "<i4").tobytes()))
    message = bytes_field(1, chunk)
    for name, values in inputs.items():
        value = values if isinstance(values, bytes) else tensor_message(values)
        message += bytes_field(2, bytes_field(1, name) + bytes_field(2, value))
    return message


def request_message(
    model_id: str, seq: int, rows: Sequence[Row], loss: str, config: Mapping[str, float], forward_only: bool
) -> bytes:
    message = bytes_field(1, model_id) + number_field(2, seq) + bytes_field(4, loss)
    message += b"".join(bytes_field(3, row_message(*row)) for row in rows)
    for name, value in config.items():
        message += bytes_field(5, bytes_field(1, name) + double_field(2, value))
    return message + number_field(6, int(forward_only))


def floats(data: Any) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, "<f4").copy())


class Failed(Exception):
    """The answer of a future that failed."""


class PlainClient:
    """One client, with a session of its own."""

    def __init__(self, http: httpx.Client, key: str = KEY) -> None:
        self.http = http
        self.headers = {"X-API-Key": key}
        self.session = self.ask("create_session", tags=[])["session_id"]
        self.num_runs = 0
        self.num_samplers = 0

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body, headers=self.headers)

    def ask(self, path: str, /, **body: Any) -> Any:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def get(self, path: str) -> Any:
        answer = self.http.get(f"/api/v1/{path}", headers=self.headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def fetch(self, future: Mapping[str, Any]) -> Any:
        while (answer := self.post("retrieve_future", request_id=future["request_id"])).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/x-protobuf":
            return read_fields(answer.content)
        if "error" in answer.json():
            raise Failed(answer.json()["error"])
        return answer.json()

    def train(self, base: str, rank: int = 4, seed: int = 1, **lora: Any) -> PlainRun:
        number = self.num_runs
        self.num_runs += 1
        config = {"rank": rank, "seed": seed, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": base, "lora_config": config}
        return PlainRun(self, self.fetch(self.ask("create_model", **body))["model_id"])

    def load(self, path: str, *, optimizer: bool = True) -> PlainRun:
        number = self.num_runs
        self.num_runs += 1
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        return PlainRun(self, self.fetch(self.ask("load_weights", **body))["model_id"])

    def sampler(self, **weights: Any) -> PlainSampler:
        number = 1000 + self.num_samplers
        self.num_samplers += 1
        body = {"session_id": self.session, "sampling_session_seq_id": number, **weights}
        return PlainSampler(self, self.ask("create_sampling_session", **body)["sampling_session_id"])


class PlainRun:
    """A training run; requests are numbered from 1."""

    def __init__(self, client: PlainClient, model_id: str, seq: int = 0) -> None:
        self.client = client
        self.model_id = model_id
        self.seq = seq

    def next(self) -> dict[str, Any]:
        self.seq += 1
        return {"model_id": self.model_id, "seq_id": self.seq}

    def send(
        self, rows: Sequence[Row], loss: str, seq: int, config: Mapping[str, float] | None = None, **how: bool
    ) -> httpx.Response:
        body = request_message(self.model_id, seq, rows, loss, config or {}, how.get("forward_only", False))
        return self.client.http.post("/api/v1/forward_backward", content=body, headers=self.client.headers)

    def forward_backward(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, float] | None = None, **how: bool
    ) -> tuple[list[Tensor], float]:
        answer = self.send(rows, loss, self.next()["seq_id"], config, **how)
        assert answer.status_code == 200, answer.text
        return read_outputs(self.client.fetch(answer.json()))

    def step(self, **adam: float) -> float:
        future = self.client.ask("optim_step", adam_params=adam, **self.next())
        return float(self.client.fetch(future)["metrics"]["grad_norm"])

    def save(self, name: str, **how: Any) -> str:
        future = self.client.ask("save_weights", path=name, **how, **self.next())
        return str(self.client.fetch(future)["path"])

    def sampler(self) -> PlainSampler:
        number = self.client.num_samplers
        self.client.num_samplers += 1
        future = self.client.ask("save_weights_for_sampler", sampling_session_seq_id=number, **self.next())
        return PlainSampler(self.client, self.client.fetch(future)["sampling_session_id"])


class PlainSampler:
    """A sampling session."""

    def __init__(self, client: PlainClient, name: str) -> None:
        self.client = client
        self.name = name
        self.seq = 0

    def ask(self, prompt: Sequence[int], count: int = 1, **how: Any) -> httpx.Response:
        asked = {key: how.pop(key) for key in tuple(how) if key.startswith(("prompt_", "topk_"))}
        self.seq += 1
        return self.client.post(
            "asample",
            sampling_session_id=self.name,
            seq_id=self.seq,
            num_samples=count,
            prompt={"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            sampling_params=how,
            **asked,
        )

    def sample(self, prompt: Sequence[int], count: int = 1, **how: Any) -> Fields:
        answer = self.ask(prompt, count, **how)
        assert answer.status_code == 200, answer.text
        found: Fields = self.client.fetch(answer.json())
        return found

    def responses(self, prompt: Sequence[int], count: int = 1, **how: Any) -> list[tuple[list[int], Tensor]]:
        return [read_sequence(each) for each in self.sample(prompt, count, **how)[1]]


def read_sequence(message: Any) -> tuple[list[int], Tensor]:
    """Tokens of a response and their log-probs."""
    fields = read_fields(message)
    tokens: list[int] = np.frombuffer(fields[2][0], "<i4").tolist()  # type: ignore[arg-type]
    return tokens, floats(fields[3][0])


def read_outputs(message: Fields) -> tuple[list[Tensor], float]:
    """Log-probs of each row, and the loss of all."""
    rows = []
    for record in message[2]:
        tensor = read_fields(read_fields(read_fields(record)[2][0])[2][0])  # type: ignore[arg-type]
        rows.append(floats(tensor[1][0]).reshape(-1, *tensor.get(4, [])))  # type: ignore[arg-type]
    metric = read_fields(message[3][0])  # type: ignore[arg-type]
    assert metric[1] == [b"loss:sum"]
    return rows, float(np.frombuffer(metric[2][0], "<f8")[0])  # type: ignore[arg-type]
