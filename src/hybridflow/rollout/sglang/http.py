"""Requests to SGLang's HTTP server: /generate, whose tokens stream back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hybridflow.rollout.remote.http import Address, Call, Refused, ServerGone
from hybridflow.rollout.remote.runner import Piece, Submission


def open_stream(
    address: Address,
    submission: Submission,
    rid: str,
    version: str,
    *,
    end: Callable[[], None],
    timeout: float,
) -> Stream:
    """Begin a response whose tokens must come from weights of version `version`; raises ServerGone.

    `end`: function that makes SGLang stop the response.
    """
    params = submission.params
    body = {
        "rid": rid,
        "input_ids": list(submission.prompt),
        "sampling_params": params["sampling_params"],
        "return_logprob": True,
        "top_logprobs_num": params["top_logprobs_num"],
        "stream": True,
    }
    call = address.begin("/generate", body, timeout=timeout)
    return Stream(submission.request_id, call, cuts=frozenset(params["cuts"]), version=version, end=end)


class Stream:
    """A response that is being streamed. `cuts`: tokens that end it here, though SGLang would go on."""

    def __init__(
        self, request_id: int, call: Call, *, cuts: frozenset[int], version: str, end: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self._call = call
        self._cuts = cuts
        self._version = version
        self._end = end

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces to the last one; ServerGone where the stream ends before it."""
        try:
            for event in self._call.events():
                piece = self._piece(event)
                yield piece
                if piece.finish is not None:
                    return
        except Refused as error:
            yield Piece(self.request_id, finish="error", error=f"sglang refused it: {error}")
            return
        raise ServerGone("the stream ended before the response did")

    def close(self) -> None:
        """Close the connection."""
        self._call.hang_up()

    def _piece(self, event: dict[str, Any]) -> Piece:
        if "error" in event:
            return Piece(
                self.request_id,
                finish="error",
                error=f"sglang refused it: {event['error'].get('message', event['error'])}",
            )
        meta = event["meta_info"]
        ids = event["output_ids"]
        scores = meta.get("output_token_logprobs") or []
        if [token for _, token, _ in scores] != ids:
            return Piece(
                self.request_id,
                finish="error",
                error=f"sglang sent {len(ids)} tokens and log-probs of {len(scores)} others",
            )
        if meta["weight_version"] != self._version:
            told = (
                f"its weights became {meta['weight_version']!r} meanwhile, and {self._version!r} was "
                "asked for"
            )
            return Piece(self.request_id, finish="error", error=f"sglang: {told}")
        top = [
            [(token, value) for value, token, _ in place] for place in meta.get("output_top_logprobs") or []
        ]
        cut = next((number for number, token in enumerate(ids, 1) if token in self._cuts), None)
        log_probs = [value for value, _, _ in scores]
        if cut is not None:
            if meta["finish_reason"] is None:
                self._end()
            return Piece(self.request_id, ids[:cut], log_probs[:cut], top[:cut], "stop", ids[cut - 1])
        ended = meta["finish_reason"]
        if ended is None:
            return Piece(self.request_id, ids, log_probs, top)
        if ended["type"] not in ("stop", "length"):
            return Piece(
                self.request_id,
                ids,
                log_probs,
                top,
                "error",
                error=f"sglang ended it: {ended.get('message', ended['type'])}",
            )
        return Piece(self.request_id, ids, log_probs, top, ended["type"], ended.get("matched"))
