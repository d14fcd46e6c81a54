"""The page of a run, or of two: its parts and the data in one string, written as one HTML file, or served
on this machine while a run writes (`hybridflow view --live RUN`).

    run folder ──collect──► JSON data ──render──► report.html

What is missing is left out, with a note on the page. The page's own source stands in `assets/`; the data is
embedded as JSON.

    browser ──GET /?token=…──► the page        ──GET /changes?run=0&after=CURSOR──► what is new in the files
                                               ──GET /trajectory?run=0&kind=…&step=…&index=…──► its rows

It listens on the loopback address only. Every request needs the token that was made at the start, and names
a run by its number, never a path. The run is not asked for anything: this process can end without harm.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hybridflow.errors import ConfigError, DataError
from hybridflow.observability.report.follow import KINDS, RunFollower
from hybridflow.observability.report.rows import detail, digests, take_pictures

logger = logging.getLogger(__name__)
MAX_SAMPLE_STEPS = 20  # steps whose rows are embedded whole
MAX_ROWS = 64  # a step
MAX_PICTURES = 4 * 2**20  # characters of all pictures of the page

SCRIPTS = (
    "charts.js",
    "store.js",
    "overview.js",
    "table.js",
    "rollouts.js",
    "trajectory.js",
    "timeline.js",
    "compare.js",
    "page.js",
)
HOST = "127.0.0.1"
_NAMES = ("127.0.0.1", "localhost")
"""Names that it answers to. Another one is that of a foreign page that has bound its own to this machine."""


def write_report(
    run_dir: str | Path, out: str | Path | None = None, against: str | Path | None = None
) -> Path:
    """Write the report of a run to `out` (default: `report.html` in its folder) and return its path.

    `against` is the folder of a run to compare it with. Raises DataError where a folder does not exist or
    holds nothing of a run, ConfigError where `out` cannot be written.
    """
    data = _whole(Path(run_dir))
    if against is not None:
        data["other"] = _whole(Path(against))
    target = Path(out or Path(run_dir) / "report.html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(render(data)[0], encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written ({error}): give another file") from error
    return target


def _whole(run: Path) -> dict[str, Any]:
    """Return the data of an existing run."""
    if not run.is_dir():
        raise DataError(f"{run} is no folder: give the run folder (trainer.default_local_dir) of a run")
    data = collect(run)
    ended = data["summary"] is not None or data["failure"] is not None
    if not (ended or any(data[part] for part in ("steps", "rollouts", "config", "log"))):
        raise DataError(
            f"{run} holds no metrics.jsonl, samples/, validation/, summary.json, failure.json, config.yaml "
            "or log.txt: is it the folder of a run?"
        )
    return data


def collect(run: Path) -> dict[str, Any]:
    """Return everything that the page shows, as JSON data; its `notes` say what is missing or cut.

    `details` has whole rows of evenly chosen steps, by "kind/step", and `pictures` their pictures by digest.
    """
    follower = RunFollower(run)
    follower.poll()
    data = follower.changes()
    details = {}
    for kind in KINDS:
        folder = follower.folders[kind]
        steps = evenly(sorted(folder.files), MAX_SAMPLE_STEPS)
        for step in steps:
            rows = [row for row in folder.rows(step) if row is not None]
            details[f"{kind}/{step}"] = [detail(row) for row in rows[:MAX_ROWS]]
        if len(steps) < len(folder.files):
            data["notes"].append(
                f"{kind}: of {len(folder.files)} steps {len(steps)} have their texts whole, evenly chosen; "
                "`hybridflow view --live` shows all."
            )
        if any(file.total > MAX_ROWS for file in folder.files.values()):
            data["notes"].append(
                f"{kind}: the first {MAX_ROWS} rows of a step have their texts whole; "
                "`hybridflow view --live` shows all."
            )
    embedded = [row for rows in details.values() for row in rows]
    pictures = take_pictures(embedded, MAX_PICTURES)
    if missing := digests(embedded) - pictures.keys():
        data["notes"].append(
            f"Pictures of samples that are named and not shown, as they did not fit: {len(missing)}."
        )
    return {**data, "details": details, "pictures": pictures}


def render(data: Mapping[str, Any], *, live: bool = False) -> tuple[str, str]:
    """Return the page, and the content security policy that it is held to: its own script and style, and
    where it is `live` requests to the server that it comes from.
    """
    files = resources.files("hybridflow.observability.report").joinpath("assets")
    script = "\n".join(files.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    style = files.joinpath("page.css").read_text(encoding="utf-8")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; img-src data:"
    if live:
        policy += "; connect-src 'self'"
    parts = {"SCRIPT": script, "CSS": style, "POLICY": policy, "DATA": embed_json(data)}
    template = files.joinpath("page.html").read_text(encoding="utf-8")
    # one pass over the template, so that a placeholder's name inside the data stays data
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template), policy


def _hash(text: str) -> str:
    """Return the source expression by which a policy allows this text between its tags."""
    digest = hashlib.sha256(f"\n{text}\n".encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def embed_json(data: Any) -> str:
    """Return JSON for a <script> element, without `<`, `>` and `&`, which could end it."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    # half of a surrogate pair cannot be written as UTF-8; as an escape it can
    return re.sub(r"[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def evenly(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[round(index * (len(items) - 1) / (count - 1))] for index in range(count)]


class LiveServer:
    """Serves the page of a run, and of one to compare it with."""

    def __init__(self, runs: Sequence[str | Path], port: int = 0) -> None:
        """Listen on `port`, 0: one that is free. ConfigError where the port is taken."""
        self.token = secrets.token_urlsafe(24)
        self.followers = [RunFollower(run) for run in runs]
        self._lock = threading.Lock()
        self._page, self._policy = render({"live": len(runs)}, live=True)
        try:
            self._http = ThreadingHTTPServer((HOST, port), self._handler())
        except OSError as error:
            raise ConfigError(f"port {port} cannot be listened on ({error}): set another --port") from error
        self._http.daemon_threads = True

    @property
    def url(self) -> str:
        """Address of the page, with the token."""
        return f"http://{HOST}:{self._http.server_port}/?token={self.token}"

    def serve(self) -> None:
        """Answer until `close` is called."""
        self._http.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop to answer, and let the port go."""
        self._http.shutdown()
        self._http.server_close()

    def answer(self, target: str, host: str, token: str) -> tuple[int, str, str]:
        """Return status, content type and body for a request."""
        url = urlsplit(target)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if host.rpartition(":")[0] not in _NAMES:
            return 403, "text/plain", "this server answers to 127.0.0.1 and localhost"
        given = (token or query.get("token", "")).encode("utf-8", "replace")
        if not hmac.compare_digest(given, self.token.encode()):
            return (
                403,
                "text/plain",
                "the token is missing or wrong: open the address that the command printed",
            )
        if url.path == "/":
            return 200, "text/html", self._page
        try:
            follower = self.followers[_number(query, "run", len(self.followers))]
            if url.path == "/changes":
                with self._lock:
                    follower.poll()
                    return 200, "application/json", _json(follower.changes(query.get("after", "")))
            if url.path == "/trajectory":
                step = _number(query, "step")
                index = _number(query, "index")
                with self._lock:
                    rows = follower.trajectory(query.get("kind", ""), step, index)
                return 200, "application/json", _json(rows)
        except ValueError as error:
            return 400, "text/plain", str(error)
        return 404, "text/plain", "there is no such page"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        live = self

        class Handler(BaseHTTPRequestHandler):
            """One request."""

            server_version = "hybridflow"
            sys_version = ""
            timeout = 30

            def do_GET(self) -> None:
                """Answer a request."""
                scheme, _, token = self.headers.get("Authorization", "").partition(" ")
                if scheme.lower() != "bearer":
                    token = ""
                status, kind, text = live.answer(self.path, self.headers.get("Host", ""), token.strip())
                body = text.encode("utf-8", "backslashreplace")
                self.send_response(status)
                for name, value in live.headers(kind, len(body)).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log a request where debugging is on; its address has the token in it, and stays out."""
                logger.debug("%s %s", self.command, urlsplit(self.path).path)

        return Handler

    def headers(self, kind: str, length: int) -> dict[str, str]:
        """Return the headers of an answer."""
        return {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(length),
            "Content-Security-Policy": f"{self._policy}; frame-ancestors 'none'; base-uri 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }


def _number(query: dict[str, str], name: str, below: int | None = None) -> int:
    """Return a number of the query that is not negative. ValueError where it is none."""
    text = query.get(name, "")
    if not (text.isascii() and text.isdigit()) or (below is not None and int(text) >= below):
        raise ValueError(f"{name}={text!r}: wanted a number" + ("" if below is None else f" below {below}"))
    return int(text)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
