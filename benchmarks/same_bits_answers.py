"""What a checkout answers: evaluations, and a server's replies to recorded requests. Parts of same_bits.py.

same_bits_requests.json ──HTTP──► `hybridflow serve` ──► replies without ids and times ──► digest

The server gets one request after the other. A stream is read to its end, and neighbouring events of one kind
are joined: how many tokens come in one event is a matter of timing.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from same_bits_checkout import DEADLINE, Checkout, digest_of

REQUESTS = Path(__file__).with_name("same_bits_requests.json")
TOKEN = "recorded-requests-0123456789"
STARTS_WITHIN = 600.0
"""Seconds that a server may take to start, on a busy machine."""
TIMES = {"created", "created_at", "completed_at"}
IDS = {"id", "item_id", "call_id", "tool_use_id", "request_id", "response_id"}
COUNTERS = {"sequence_number"}
"""Numbers of the events of a stream."""
TEXTS = {"text", "content", "delta", "arguments", "partial_json", "reasoning"}
"""Fields whose texts continue in the next event."""
RANDOM_PART = re.compile(r"^([a-z]+[-_]).*")


def evaluated(checkout: Checkout, model: Path, rewards: tuple[str, ...]) -> dict[str, str]:
    """Return the digests of the answers and of the table of an evaluation."""
    out = checkout.folder / "eval"
    words = ["eval", str(model), "--recipe", "tiny/grpo", "-n", "4", "--out", str(out)]
    checkout.command([*words, "data.task.val_size=64", *rewards], "eval")
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    answers.sort(key=lambda answer: (answer["prompt"], answer["sample"]))
    return {
        "answers": digest_of(answers),
        "results": digest_of(json.loads((out / "results.json").read_text())),
    }


def served(checkout: Checkout, model: Path) -> dict[str, str]:
    """Return the digest of the server's replies, which are also written to replies.json."""
    requests = json.loads(REQUESTS.read_text())
    with server(checkout, model) as address:
        replies = [reply_to(request, address) for request in requests]
    (checkout.folder / "replies.json").write_text(json.dumps(replies, indent=1, sort_keys=True))
    return {"replies": digest_of(replies), "requests": str(len(replies))}


@contextmanager
def server(checkout: Checkout, model: Path) -> Iterator[str]:
    """Serve a model by the command of a checkout, and yield the server's address."""
    log = checkout.folder / "serve.log"
    words = ["serve", str(model), "--served-model-name", "tiny", "--port", "0", "--api-key", TOKEN]
    with log.open("w") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "hybridflow.cli.main", *words, "--device", "cpu", "--dtype", "float32"],
            env=checkout.environment,
            cwd=checkout.folder,
            stdout=lines,
            stderr=lines,
        )
    try:
        until = time.monotonic() + STARTS_WITHIN
        found = None
        while found is None:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server of {checkout.source} did not start: {log.read_text()[-4000:]}")
            time.sleep(0.1)
            found = re.search(r"at (http://\S+)/v1", log.read_text())
        yield found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE)


def reply_to(request: dict[str, Any], address: str) -> dict[str, Any]:
    """Send one recorded request; returns its name, the status and the body without ids and times.

    A request has a name, a path, and a `body` (JSON) or a `raw` one (text); without either it is a GET. Its
    `headers` come on top of the token.
    """
    connection = http.client.HTTPConnection(urlsplit(address).netloc, timeout=DEADLINE)
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    headers |= request.get("headers", {})
    body = json.dumps(request["body"]) if "body" in request else request.get("raw")
    connection.request("GET" if body is None else "POST", request["path"], body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    kind = str(answer.getheader("content-type")).partition(";")[0]
    connection.close()
    content: Any = text
    if kind == "text/event-stream":
        content = joined(list(events(text)))
    elif kind == "application/json":
        content = json.loads(text)
    return {
        "name": request["name"],
        "status": answer.status,
        "kind": kind,
        "body": without_ids(content),
    }


def events(text: str) -> Iterator[Any]:
    """Yield the data of server-sent events, with their names where they have some."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "data" not in fields:
            continue
        data = fields["data"]
        if data.startswith("{"):
            data = json.loads(data)
        yield {"event": fields.get("event"), "data": data}


def joined(found: list[Any]) -> list[Any]:
    """Join neighbouring events of one kind: texts and lists of tokens are put behind each other."""
    together: list[Any] = []
    for event in found:
        if together and kind_of(event) is not None and kind_of(event) == kind_of(together[-1]):
            together[-1] = merged(together[-1], event, "")
        else:
            together.append(event)
    return together


def kind_of(event: Any) -> Any:
    """Return what events that may be joined have in common; None for one that stands alone."""
    data = event["data"]
    if not isinstance(data, dict) or "error" in data:
        return None
    if "choices" in data:  # chat and completions have one kind of event
        return "choices"
    if "delta" not in str(data.get("type")):
        return None
    return (event["event"], data["type"], data.get("index"), data.get("output_index"))


def merged(first: Any, second: Any, name: str) -> Any:
    """Return one value for those of two events in the field `name`."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, dict) and isinstance(second, dict):
        return {key: merged(first.get(key), second.get(key), key) for key in sorted({*first, *second})}
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(item, dict) and "index" in item for item in [*first, *second]):
            by_index: dict[int, Any] = {}
            for item in [*first, *second]:
                by_index[item["index"]] = merged(by_index.get(item["index"]), item, "")
            return [by_index[index] for index in sorted(by_index)]
        return [*first, *second]
    if isinstance(first, str) and isinstance(second, str) and name in TEXTS:
        return first + second
    return second


def without_ids(value: Any) -> Any:
    """Return a body whose random ids are cut to their prefix, without times and numbers of events."""
    if isinstance(value, list):
        return [without_ids(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: RANDOM_PART.sub(r"\1", item) if key in IDS and isinstance(item, str) else without_ids(item)
        for key, item in value.items()
        if key not in TIMES | COUNTERS
    }
