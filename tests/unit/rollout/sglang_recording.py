"""What the engine says to SGLang and SGLang answers: recorded from a real server once, and answered again
from the record.

python tests/unit/rollout/sglang_recording.py     in the environment of scripts/setup_sglang.sh: writes
recorded/sglang.json
"""

from __future__ import annotations

import base64
import http.client
import json
import pickle
import sys
import tempfile
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from torch import Tensor

from hybridflow.protocol.prompt import Prompt
from hybridflow.rollout.base import GenerationRequest, SamplingParams
from hybridflow.rollout.remote.http import Address
from hybridflow.rollout.sglang import loader
from hybridflow.rollout.sglang.engine import SGLangEngine
from hybridflow.rollout.sglang.server import SGLangServer

RECORD = Path(__file__).parent / "recorded" / "sglang.json"
EOS, VOCABULARY, POSITIONS = 2, 96, 128
READ = {
    "/server_info": (
        *("custom_weight_loader", "incremental_streaming_output", "speculative_algorithm"),
        *("tp_size", "device", "context_length"),
    ),
    "/model_info": ("weight_version", "model_type"),
}
"""Of these long answers only what the engine reads is kept."""
Entry = dict[str, Any]


def scenario(
    engine: SGLangEngine, weights: Callable[[int], Iterable[tuple[str, Tensor]]]
) -> list[dict[str, Any]]:
    """Two pushes, and requests of every kind; what came out."""
    outputs = []

    def run(*sampling: SamplingParams) -> None:
        requests = [
            GenerationRequest(number, Prompt((5, 6, 7 + number)), one, seed=11 + number)
            for number, one in enumerate(sampling)
        ]
        outputs.extend(
            asdict(each) for each in sorted(engine.generate(requests), key=lambda output: output.request_id)
        )

    every = SamplingParams(
        8,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.2,
        min_tokens=2,
        stop=("w9", "w8"),
        stop_token_ids=(40,),
        logit_bias=((7, 1.0),),
    )
    engine.update_weights(weights(0), 1)
    run(SamplingParams(6, greedy=True, ignore_eos=True, top_log_probs=2), every)
    assert not any(output["error"] for output in outputs), outputs
    third = outputs[0]["token_ids"][2]
    run(
        SamplingParams(60, greedy=True, ignore_eos=True, stop_token_ids=(third,)),
        SamplingParams(4, stop=tuple(f"w{n}" for n in range(40))),
    )
    engine.update_weights(weights(1), 2)
    run(SamplingParams(6, greedy=True))
    return outputs


def connect(url: str) -> SGLangEngine:
    """An engine over a server that runs already."""
    facts = {"vocabulary": VOCABULARY, "positions": POSITIONS}
    runner = SGLangServer(Address(url), None, **facts, max_streams=4, timeout=600, bucket_bytes=1 << 20)
    return SGLangEngine(runner, eos_token_ids=[EOS])


def plain(body: dict[str, Any] | None) -> dict[str, Any] | None:
    """A request without what differs from run to run: the beginning of its name, where a push listens."""
    if body is None:
        return None
    body = dict(body)
    if "rid" in body:
        body["rid"] = "run" + body["rid"][body["rid"].index("-") :]
    if "serialized_named_tensors" in body:
        body["serialized_named_tensors"] = ["a receipt"] * len(body["serialized_named_tensors"])
    return body


class Handler(BaseHTTPRequestHandler):
    """Hands each request to `answer`, which writes."""

    protocol_version = "HTTP/1.1"
    answer: Callable[[Handler, str, dict[str, Any] | None], None]

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        type(self).answer(self, "GET", None)

    def do_POST(self) -> None:
        type(self).answer(self, "POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def begin(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True


@contextmanager
def serving(answer: Callable[[Handler, str, dict[str, Any] | None], None]) -> Iterator[str]:
    """A server at the address that comes back."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"answer": staticmethod(answer)}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@contextmanager
def recording(target: Address, entries: list[Entry]) -> Iterator[str]:
    """Stands between the engine and the server, and keeps what passes."""

    def answer(handler: Handler, method: str, body: dict[str, Any] | None) -> None:
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.request(
            method,
            handler.path,
            None if body is None else json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        said: list[str] = []
        entries.append(
            {
                "method": method,
                "path": handler.path,
                "body": plain(body),
                "status": response.status,
                "answer": said,
            }
        )
        handler.begin(response.status)
        try:
            for line in response:
                said.append(line.decode())
                handler.wfile.write(line)
                handler.wfile.flush()
        except OSError:
            pass  # the engine has hung up
        connection.close()

    with serving(answer) as url:
        yield url


class Replay:
    """Answers what was recorded; `unexpected`: requests that were not. Pushes really arrive, at
    `loader.load`.
    """

    def __init__(self, entries: list[Entry], received: dict[str, Tensor]) -> None:
        self.left: dict[str, deque[Entry]] = defaultdict(deque)
        for entry in entries:
            self.left[self.key(entry["method"], entry["path"], entry["body"])].append(entry)
        self.unexpected: list[str] = []
        self.received = received

    @staticmethod
    def key(method: str, path: str, body: dict[str, Any] | None) -> str:
        return json.dumps([method, path, body], sort_keys=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """As SGLang's model has it."""
        self.received.update(weights)

    def answer(self, handler: Handler, method: str, body: dict[str, Any] | None) -> None:
        key = self.key(method, handler.path, plain(body))
        if not self.left[key]:
            self.unexpected.append(key)
            handler.begin(599)
            return
        if handler.path == "/update_weights_from_tensor" and body is not None:
            loader.load(self, pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))
        entry = self.left[key].popleft()
        handler.begin(entry["status"])
        handler.wfile.write("".join(entry["answer"]).encode())


def shortened(entry: Entry) -> Entry:
    """Without what the engine does not read of long answers."""
    text = "".join(entry["answer"])
    if entry["path"] in READ:
        told = json.loads(text)
        text = json.dumps({name: told[name] for name in READ[entry["path"]]})
    return {**entry, "answer": [text]}


def main() -> None:
    """Start a real server, let the scenario run, write the record."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "with_vllm"))
    import sglang
    import torch
    from vllm_models import save, tiny, weights

    from hybridflow.config.actor_rollout_ref import RolloutConfig
    from hybridflow.rollout.remote.model import ModelFacts
    from hybridflow.rollout.sglang.engine import server_arguments, start_server

    with tempfile.TemporaryDirectory() as folder:
        facts = ModelFacts(save(Path(folder), tiny(0)), torch.device("cpu"), "float32")
        config = RolloutConfig(name="sglang", max_model_len=POSITIONS, max_num_seqs=8)
        address, process = start_server(server_arguments(config, facts), python=None, timeout=900)
        entries: list[Entry] = []
        try:
            with recording(address, entries) as url:
                outputs = scenario(connect(url), lambda seed: weights(tiny(seed)))
        finally:
            process.stop()
    record = {
        "sglang": sglang.__version__,
        "entries": [shortened(entry) for entry in entries],
        "outputs": outputs,
    }
    RECORD.parent.mkdir(exist_ok=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(entries)} requests recorded in {RECORD}")


if __name__ == "__main__":
    main()
