"""vLLM as a server: a process of its own, started here and ended with this one, or one that runs already.

VLLMEngine ──requests, one connection each──► /v1/completions
           ──version, begin, receive────────► /collective_rpc ──► `Extension` in the server's workers ◄──weights── push
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.rollout.push.sender import LOOPBACK, Transport, address_towards, push
from hybridflow.rollout.vllm.extension import QUALIFIED_NAME
from hybridflow.rollout.vllm.http import MODEL, Address, Refused, ServerGone, Stream
from hybridflow.rollout.vllm.process import ServerProcess
from hybridflow.rollout.vllm.runner import EngineDied, Piece, Submission

logger = logging.getLogger(__name__)

_LOCAL = (LOOPBACK, "localhost")
_POLL_S = 1.0


class Server:
    """A `Runner` over a server. `process`: the one that was started for it, None: it was there already.

    `max_streams`: connections at a time. `timeout`: seconds for one call. `transport`: None to choose by where the server is.
    """

    def __init__(
        self,
        address: Address,
        process: ServerProcess | None,
        *,
        max_streams: int,
        timeout: float,
        transport: Transport | None = None,
        bucket_bytes: int,
    ) -> None:
        self.address, self.process, self.timeout, self.bucket_bytes = address, process, timeout, bucket_bytes
        local = address.host in _LOCAL
        self.transport: Transport = transport or ("shared_memory" if local else "process_group")
        self._pool = ThreadPoolExecutor(max_streams, thread_name_prefix="vllm")
        self._pieces: queue.SimpleQueue[Piece | ServerGone] = queue.SimpleQueue()
        self._streams: dict[int, Stream | None] = {}
        self._lock = threading.Lock()
        self._death: str | None = None
        self._model = MODEL if process is not None else self._served_model()
        self._workers = 1

    @property
    def name(self) -> str:
        """Which engine this is, for messages."""
        return f"vllm server {self.address.url}" + (f" (process {self.process.pid})" if self.process else "")

    def facts(self) -> dict[str, Any]:
        """What the workers say of themselves; RolloutError where they lack our extension."""
        try:
            found = self._call("hybridflow_begin", {})
        except Refused as error:
            raise RolloutError(
                f"{self.name} does not take our calls ({error}): start it with VLLM_SERVER_DEV_MODE=1, VLLM_USE_V2_MODEL_RUNNER=0, "
                f"--worker-extension-cls {QUALIFIED_NAME} and --logprobs-mode processed_logprobs, in a python that has hybridflow"
            ) from error
        self._workers = len(found)
        facts: dict[str, Any] = found[0]
        return facts

    def version(self) -> int:
        """That of the weights in the server's workers."""
        return min(int(answer["version"]) for answer in self._call("hybridflow_version", {}))

    def start(self, submissions: Sequence[Submission]) -> None:
        """Queue these; EngineDied."""
        self._alive()
        self._pieces = queue.SimpleQueue()
        with self._lock:
            self._streams = {submission.request_id: None for submission in submissions}
        for submission in submissions:
            self._pool.submit(self._stream, submission, self._pieces)

    def poll(self) -> list[Piece]:
        """What has come, at least one piece; EngineDied."""
        while True:
            try:
                found = [self._pieces.get(timeout=_POLL_S)]
                break
            except queue.Empty:
                self._alive()
        found += [self._pieces.get() for _ in range(self._pieces.qsize())]  # and not until it is empty: more may come all the time
        pieces = [each for each in found if isinstance(each, Piece)]
        gone = [each for each in found if isinstance(each, ServerGone)]
        if gone and not pieces:
            raise self._died(str(gone[0]))
        if gone:
            self._pieces.put(gone[0])  # what came before it is not lost
        return pieces

    def abort(self, request_ids: Iterable[int]) -> None:
        """Hang up on these."""
        with self._lock:
            streams = [self._streams.pop(request_id, None) for request_id in request_ids]
        for stream in streams:
            if stream is not None:
                stream.close()

    def push(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Weights to all workers in buckets, and the prefix cache emptied; RolloutError where they did not arrive."""
        self._alive()
        push(
            self._call,
            weights,
            version,
            workers=self._workers,
            transport=self.transport,
            host=LOOPBACK if self.address.host in _LOCAL else address_towards(self.address.host, self.address.port),
            bucket_bytes=self.bucket_bytes,
            timeout=self.timeout,
        )
        emptied = self._guarded(lambda: self.address.call("/reset_prefix_cache", {}, timeout=self.timeout))
        if isinstance(emptied, dict) and not emptied.get("success", True):
            raise RolloutError(f"{self.name} could not empty its prefix cache after a push of weights: does someone else use it?")

    def sleep(self, level: int) -> None:
        """Give memory back."""
        if level > 1:
            self._call("hybridflow_forget", {})
        self._guarded(lambda: self.address.call(f"/sleep?level={level}", timeout=self.timeout))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory again."""
        query = "?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""
        self._guarded(lambda: self.address.call(f"/wake_up{query}", timeout=self.timeout))

    def close(self) -> None:
        """End the server where it was started here."""
        self._death = self._death or "it was closed"
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self.process is not None:
            self.process.stop()

    def _stream(self, submission: Submission, pieces: queue.SimpleQueue[Piece | ServerGone]) -> None:
        request_id = submission.request_id
        with self._lock:
            if request_id not in self._streams:
                return
        try:
            stream = self.address.open_stream(submission, self._model, timeout=self.timeout)
            with self._lock:
                wanted = request_id in self._streams
                if wanted:
                    self._streams[request_id] = stream
            if not wanted:
                stream.close()
                return
            for piece in stream.pieces():
                pieces.put(piece)
        except ServerGone as error:
            with self._lock:
                aborted = request_id not in self._streams
            if not aborted:
                pieces.put(error)
        except Exception as error:  # an answer that nobody foresaw must not leave the caller waiting
            pieces.put(Piece(request_id, finish="error", error=f"{type(error).__name__}: {error}"))

    def _served_model(self) -> str:
        listed = self._guarded(lambda: self.address.call("/v1/models", timeout=self.timeout, method="GET"))
        return str(listed["data"][0]["id"])

    def _call(self, method: str, argument: dict[str, Any]) -> list[Any]:
        body = {"method": method, "args": [argument] if argument else []}
        answers: list[Any] = self._guarded(lambda: self.address.call("/collective_rpc", body, timeout=self.timeout))["results"]
        return answers

    def _guarded(self, call: Callable[[], Any]) -> Any:
        self._alive()
        try:
            return call()
        except ServerGone as error:
            raise self._died(str(error)) from error

    def _alive(self) -> None:
        if self._death is not None:
            raise EngineDied(f"{self.name} died earlier: {self._death}")
        if self.process is not None and self.process.exit_code() is not None:
            raise self._died("its process ended")

    def _died(self, reason: str) -> EngineDied:
        how = self.process.last_words() if self.process is not None else ""
        self._death = f"{reason}{how}"
        return EngineDied(f"{self.name} died: {self._death}")
