"""Requests to vLLM's HTTP server: completions whose tokens stream back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridflow.rollout.remote.http import Address, Call, Refused, ServerGone
from hybridflow.rollout.remote.runner import Piece, Submission

MODEL = "policy"
"""Name of the model in a server that is started here."""


def open_stream(address: Address, submission: Submission, model: str, *, timeout: float) -> Stream:
    """Begin a completion; raises ServerGone."""
    body = {
        **submission.params,
        "model": model,
        "prompt": list(submission.prompt),
        "stream": True,
        "add_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "skip_special_tokens": False,
    }
    call = address.begin("/v1/completions", body, timeout=timeout)
    return Stream(submission.request_id, call, wants_top=bool(submission.params.get("logprobs")))


class Stream:
    """A completion that is being streamed."""

    def __init__(self, request_id: int, call: Call, *, wants_top: bool) -> None:
        self.request_id = request_id
        self._call = call
        self._wants_top = wants_top

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces to the last one; ServerGone where the stream ends before it."""
        try:
            for event in self._call.events():
                piece = self._piece(event)
                if piece is None:
                    continue
                yield piece
                if piece.finish is not None:
                    return
        except Refused as error:
            yield Piece(self.request_id, finish="error", error=f"vllm refused it: {error}")
            return
        raise ServerGone("the stream ended before the response did")

    def close(self) -> None:
        """Close the connection, which makes vLLM drop the request."""
        self._call.hang_up()

    def _piece(self, event: dict[str, Any]) -> Piece | None:
        if "error" in event:
            return Piece(
                self.request_id,
                finish="error",
                error=f"vllm: {event['error'].get('message', event['error'])}",
            )
        if not event["choices"]:
            return None
        choice = event["choices"][0]
        finish = choice.get("finish_reason")
        scores = choice.get("logprobs") or {}
        ids = choice.get("token_ids") or []
        log_probs = scores.get("token_logprobs") or []
        if len(ids) != len(log_probs):
            return Piece(
                self.request_id,
                finish="error",
                error=f"vllm sent {len(ids)} tokens and {len(log_probs)} log-probs",
            )
        top = [_ranked(place) for place in scores.get("top_logprobs") or []] if self._wants_top else []
        if finish not in (None, "stop", "length"):
            return Piece(
                self.request_id, ids, log_probs, top, "error", error=f"vllm ended it with {finish!r}"
            )
        return Piece(self.request_id, ids, log_probs, top, finish, choice.get("stop_reason"))


def _ranked(place: dict[str, float]) -> list[tuple[int, float]]:
    """Return {"token_id:17": -0.1, …} as pairs, the most probable first."""
    found = [(int(name.removeprefix("token_id:")), value) for name, value in place.items()]
    return sorted(found, key=lambda each: -each[1])
