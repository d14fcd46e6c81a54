"""Log-probs of tokens in the two shapes of OpenAI's interface, in nats, of the temperature-scaled full
distribution.
"""

from __future__ import annotations

from typing import Any

from hybridflow.rollout.server.reading import Piece
from hybridflow.rollout.server.text import TokenNames

LEAST = -9999.0
"""Log-prob that is written for a probability of 0, as OpenAI does: JSON has no infinity."""


def chat_log_probs(piece: Piece, names: TokenNames, top: int) -> dict[str, Any]:
    """Return {"content": one entry for each token of the piece}."""
    content = []
    for place, (token, value) in enumerate(zip(piece.token_ids, piece.log_probs, strict=True)):
        others = [] if piece.top_log_probs is None else piece.top_log_probs[place][:top]
        content.append(
            {
                **_named(names, token, value),
                "top_logprobs": [_named(names, other, each) for other, each in others],
            }
        )
    return {"content": content, "refusal": None}


def completion_log_probs(piece: Piece, names: TokenNames, top: int, offset: int) -> dict[str, Any]:
    """Return parallel lists; `offset` is the place in the text at which the first token begins."""
    texts = [names.text(token) for token in piece.token_ids]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops = None
    if top and piece.top_log_probs is not None:
        tops = [
            {names.text(token): max(value, LEAST) for token, value in reversed(place[:top])}
            for place in piece.top_log_probs
        ]
    return {
        "tokens": texts,
        "token_logprobs": [max(value, LEAST) for value in piece.log_probs],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _named(names: TokenNames, token: int, value: float) -> dict[str, Any]:
    return {"token": names.text(token), "logprob": max(value, LEAST), "bytes": names.bytes(token)}
