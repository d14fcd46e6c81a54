"""A runner over SGLang's server, which was started here or runs already.

SGLangEngine ──requests, one connection each──► /generate
             ──version────────────────────────► /model_info, /update_weight_version
             ──receipt────────────────────────► /update_weights_from_tensor ──► `loader.load` in SGLang's
             workers ◄──weights── push
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hybridflow.errors import RolloutError
from hybridflow.rollout.remote.http import Refused
from hybridflow.rollout.remote.runner import ResponsePiece, Submission
from hybridflow.rollout.remote.served import Served, Stream
from hybridflow.rollout.sglang.loader import QUALIFIED_NAME, packed
from hybridflow.weight_sync.wire.channel import Listener
from hybridflow.weight_sync.wire.receiver import NOTHING, Weights

_LABEL = "hybridflow:"
"""How the names of our versions begin; SGLang calls weights that were not pushed "default"."""
_REPORT_S = 5.0


@dataclass(eq=False, kw_only=True)
class SGLangServer(Served):
    """An `EngineRunner` over an SGLang server. `vocabulary` and `positions` are the model's, unless
    the server says.
    """

    engine = "sglang"
    vocabulary: int
    positions: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._run = ""
        self._runs = itertools.count(1)
        self._prefix = secrets.token_hex(4)
        self._version = ""
        self._released: set[str] = set()

    def facts(self) -> dict[str, Any]:
        """Return the server's facts; RolloutError where it was started without an option that is needed."""
        told = self._get("/server_info")
        if QUALIFIED_NAME not in (told.get("custom_weight_loader") or ()) or not told.get(
            "incremental_streaming_output"
        ):
            raise RolloutError(
                f"{self.name} does not take our weights: start it with --custom-weight-loader "
                f"{QUALIFIED_NAME} and --incremental-streaming-output, in a python that has hybridflow"
            )
        if told.get("speculative_algorithm"):
            raise RolloutError(
                f"{self.name} speculates ({told['speculative_algorithm']}), which draws in another way: "
                "start it without"
            )
        self._workers = int(told["tp_size"])
        return {
            "vocabulary": self.vocabulary,
            "device": told["device"],
            "positions": int(told.get("context_length") or self.positions),
        }

    def version(self) -> int:
        """Return the version of the weights in the server."""
        label = str(self._get("/model_info")["weight_version"])
        if not label.startswith(_LABEL):
            return NOTHING
        return int(label.removeprefix(_LABEL))

    def start(self, submissions: Sequence[Submission]) -> None:
        """Queue these requests; raises EngineDied."""
        self._run = f"{self._prefix}-{next(self._runs)}"
        self._version = f"{_LABEL}{self.version()}"
        super().start(submissions)

    def open(self, submission: Submission) -> Stream:
        """Begin a response; raises ServerGone."""
        rid = f"{self._run}-{submission.request_id}"
        params = submission.params
        body = {
            "rid": rid,
            "input_ids": list(submission.prompt),
            "sampling_params": params["sampling_params"],
            "return_logprob": True,
            "top_logprobs_num": params["top_logprobs_num"],
            "stream": True,
        }
        call = self.address.begin("/generate", body, timeout=self.timeout)
        read = partial(self._piece, submission.request_id, rid, self._version, frozenset(params["cuts"]))
        return Stream(call, read)

    def _piece(
        self, number: int, rid: str, version: str, cuts: frozenset[int], event: dict[str, Any]
    ) -> ResponsePiece:
        """Return what an event adds to response `number`, whose tokens must come from weights of `version`.

        `cuts`: tokens that end it here, though SGLang would go on.
        """
        meta = event["meta_info"]
        ids = event["output_ids"]
        scores = meta.get("output_token_logprobs") or []
        if [token for _, token, _ in scores] != ids:
            told = f"sglang sent {len(ids)} tokens and log-probs of {len(scores)} others"
            return ResponsePiece.failed(number, told)
        if meta["weight_version"] != version:
            told = f"its weights became {meta['weight_version']!r} meanwhile, and {version!r} was asked for"
            return ResponsePiece.failed(number, f"sglang: {told}")
        top = [
            [(token, value) for value, token, _ in place] for place in meta.get("output_top_logprobs") or []
        ]
        log_probs = [value for value, _, _ in scores]
        ended = meta["finish_reason"]
        cut = next((place for place, token in enumerate(ids, 1) if token in cuts), None)
        if cut is not None:
            if ended is None:
                self._end(rid)
            return ResponsePiece(number, ids[:cut], log_probs[:cut], top[:cut], "stop", ids[cut - 1])
        if ended is None:
            return ResponsePiece(number, ids, log_probs, top)
        if ended["type"] in ("stop", "length"):
            return ResponsePiece(number, ids, log_probs, top, ended["type"], ended.get("matched"))
        told = f"sglang ended it: {ended.get('message', ended['type'])}"
        return ResponsePiece(number, ids, log_probs, top, "error", error=told)

    def abort(self, request_ids: Iterable[int]) -> None:
        """Close the connections of these requests and abort them: SGLang would notice seconds later."""
        ended = list(request_ids)
        super().abort(ended)
        for request_id in ended:
            self._end(f"{self._run}-{request_id}")

    def push(self, weights: Weights, version: int) -> None:
        """Push weights to all workers and empty the prefix cache; RolloutError where they did not arrive."""
        self._alive()
        self._name_weights(NOTHING)
        try:
            self._post("/begin_weight_update", {"selector": "target"})
        except Refused:  # one that was cut off is still open
            self._post("/end_weight_update", {})
            self._post("/begin_weight_update", {"selector": "target"})
        try:
            self._push(self._call, weights, version)
        except BaseException:  # the reason is raised, and not that it cannot be ended either
            with contextlib.suppress(RolloutError):
                self._post("/end_weight_update", {})
            raise
        self._post("/end_weight_update", {})
        self._name_weights(version)

    def sleep(self, level: int) -> None:
        """Give memory back; the weights stay on the CPU (--enable-weights-cpu-backup) at level 1."""
        if level > 1:
            self._name_weights(NOTHING)
        tags = [tag for tag in ("kv_cache", "weights") if tag not in self._released]
        if tags:  # SGLang would take none for all
            self._post("/release_memory_occupation", {"tags": tags})
        self._released |= set(tags)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again; `tags` names its parts."""
        wanted = sorted(self._released.intersection(tags))
        if wanted:
            self._post("/resume_memory_occupation", {"tags": wanted})
        self._released -= set(wanted)

    def _end(self, rid: str) -> None:
        with contextlib.suppress(RolloutError):  # nothing runs any more, or not this one
            self._post("/abort_request", {"rid": rid})

    def _name_weights(self, version: int) -> None:
        self._post(
            "/update_weight_version", {"new_version": f"{_LABEL}{version}", "abort_all_requests": False}
        )

    def _call(self, method: str, receipt: dict[str, Any]) -> list[dict[str, Any]]:
        """Hand the receipt of a push to `loader.load` in each worker and return their answers."""
        listener = Listener(receipt["host"])
        try:
            named = packed({**receipt, "report_port": listener.port, "report_token": listener.token})
            body = {
                "serialized_named_tensors": [named] * self._workers,
                "load_format": QUALIFIED_NAME,
                "selector": "target",
            }
            self._post("/update_weights_from_tensor", body)
            # each has reported before the call returned
            channels = listener.accept(self._workers, timeout=_REPORT_S, failed=lambda: False)
            return [channel.receive() for channel in channels]
        finally:
            listener.close()
