"""Reader of one response as it grows: new tokens in, pieces of an answer out. Streamed and whole answers are
read by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hybridflow.data.tokenizer import text_of
from hybridflow.rollout.base import GenerationOutput, PartialOutput
from hybridflow.rollout.server.errors import ApiError
from hybridflow.rollout.server.job import Job
from hybridflow.rollout.server.model import Detokenizer, ServedModel, StopCutter
from hybridflow.rollout.server.prompts import text_in
from hybridflow.tools.parsers import KNOWN_TAGS, TOOL_PARSERS, ToolCall
from hybridflow.tools.parsers.base import CallParser
from hybridflow.tools.parsers.response import (
    PROMPT_END,
    ends_in_thinking,
    leaves_thinking,
    other_format,
)

STATUSES = {"abort": 503, "error": 500}
"""HTTP status for the end of a request that was not the request's fault."""


@dataclass(frozen=True)
class Piece:
    """New part of one response; the lists of tokens are equally long."""

    choice: int
    parts: list[str | ToolCall]
    token_ids: list[int]
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]] | None
    finish_reason: str | None = None
    """End of the last piece: stop, length or tool_calls; None for the others."""
    stop_reason: int | str | None = None

    @property
    def text(self) -> str:
        """Text of the piece without calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def whole_text(self) -> str:
        """Text of a whole response: between calls and around them there is white space."""
        return self.text.strip() if self.calls else self.text

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls that are whole."""
        return [part for part in self.parts if isinstance(part, ToolCall)]


class ChoiceReader:
    """Reader of response number `choice` of a job."""

    def __init__(self, job: Job, model: ServedModel, choice: int) -> None:
        self.job = job
        self.model = model
        self.choice = choice
        self.num_tokens = 0
        self.num_calls = 0
        prompt = choice // job.body.n
        token_ids = job.prompts[prompt].token_ids
        self._parser = self._parser_behind(token_ids)
        self._detokenizer = Detokenizer(
            model.tokenizer,
            token_ids,
            skip_special_tokens=job.body.skip_special_tokens,
            keep=KNOWN_TAGS if self._parser else frozenset(),
        )
        self._cutter = StopCutter(job.sampling[prompt].stop)
        self._texts: list[str] = []
        self._first: list[str | ToolCall] = [*job.echo[prompt : prompt + 1]]
        if self._parser is not None and job.tools.opening:
            self._first = self._parser.feed(job.tools.opening)

    def _parser_behind(self, prompt: Sequence[int]) -> CallParser | None:
        """Return the parser of a response to a prompt, where it may have calls."""
        tools = self.job.tools
        if not tools.parser:
            return None
        options = self.job.template_options
        in_thinking = ends_in_thinking(text_of(self.model.tokenizer, prompt[-PROMPT_END:]))
        if options.get("continue_final_message"):
            in_thinking = leaves_thinking(text_in(self.job.messages[-1]["content"]))
        return TOOL_PARSERS[tools.parser](options["tools"], in_thinking=in_thinking)

    def read(self, output: PartialOutput | GenerationOutput) -> Piece:
        """Return what is new in `output`, a part of the response or all of it; the last piece says its end.

        ApiError for a request that did not finish (400 where the engine refused it), and for a
        response that had to be a call and is none.
        """
        ended = output if isinstance(output, GenerationOutput) else None
        if ended is not None and ended.finish_reason in STATUSES:
            status = 400 if ended.refused else STATUSES[ended.finish_reason]
            message = ended.error or "the request was aborted by the server"
            raise ApiError(status, message, code=ended.finish_reason)
        seen = self.num_tokens  # of the tokens in `output`
        if isinstance(output, PartialOutput):
            seen -= output.start
        new = output.token_ids[seen:]
        log_probs = output.log_probs[seen:]
        top = output.top_log_probs and output.top_log_probs[seen:]
        self.num_tokens += len(new)
        by_token = ended is not None and ended.finish_reason == "stop" and isinstance(ended.stop_reason, int)
        # a stop token ends the response and is no part of its text
        text = self._detokenizer.add(new[:-1] if by_token else new)
        text = self._cutter.add(text + (self._detokenizer.end() if ended else ""))
        if ended is None and self._cutter.found is None:
            return self._piece(Piece(self.choice, self._parts(text), new, log_probs, top))
        reason = "stop"
        stop: int | str | None = self._cutter.found
        if ended is not None and stop is None:
            reason = ended.finish_reason
            stop = ended.stop_reason
        parts = self._parts(text + self._cutter.end()) + self._last_parts(cut=reason == "length")
        return self._piece(Piece(self.choice, parts, new, log_probs, top, reason, stop))

    def _piece(self, piece: Piece) -> Piece:
        """Check and count the piece's calls; where one call is wanted, nothing comes after it."""
        wanted = self.job.tools.callable
        if wanted is not None and (piece.finish_reason or piece.calls):
            self._check_calls(piece, wanted)
        if self.job.tools.one_call and piece.calls:
            place = piece.parts.index(piece.calls[0])
            piece = replace(piece, parts=piece.parts[: place + 1], finish_reason="stop", stop_reason=None)
        self.num_calls += len(piece.calls)
        if piece.finish_reason == "stop" and self.num_calls:
            return replace(piece, finish_reason="tool_calls")
        return piece

    def _check_calls(self, piece: Piece, wanted: frozenset[str]) -> None:
        other = next((call.name for call in piece.calls if call.name not in wanted), None)
        if other is not None:
            raise ApiError(
                500,
                f"tool_choice: the model called {other!r}, which is none of {sorted(wanted)}: ask again",
                code="no_tool_call",
            )
        if self.num_calls or piece.calls:
            return
        status = 500
        advice = "ask again"
        if piece.finish_reason == "length":  # the caller's doing: the same again would end the same way
            status = 400
            advice = "max_tokens ended the call before it was whole: raise max_tokens"
        raise ApiError(
            status,
            f"tool_choice: the model did not complete the call that it had to begin ({advice})",
            code="no_tool_call",
        )

    def _parts(self, text: str) -> list[str | ToolCall]:
        parts = self._first
        self._first = []
        if self._parser is not None:
            parts += self._parser.feed(text)
            self._texts.append(text)
        elif text:
            parts.append(text)
        return parts

    def _last_parts(self, cut: bool) -> list[str | ToolCall]:
        """Return the held-back parts, and warn where a response without calls has some in another format."""
        parser = self._parser
        name = self.job.tools.parser
        if parser is None or name is None:
            return []
        parts = parser.end(cut)
        if not parser.num_calls:
            other = other_format(
                name,
                "".join(self._texts),
                self.job.template_options["tools"],
                problems=bool(parser.problems),
                in_thinking=parser.in_thinking,
            )
            if other:
                self.model.other_formats.warn(other, name)
        return parts
