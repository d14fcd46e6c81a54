"""Traces wait here for the thread that sends them, so that nobody else waits for a collector.

    put ──bounded queue──► thread: texts are decoded, and the exporter sends what has come meanwhile

A collector that is dead or slow costs a warning and a count. Nothing is drawn from anybody's random state.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hybridflow.protocol.spans import TraceSpan


logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]

MOST_WAITING = 4096
"""Traces that may wait; later ones are dropped, and counted."""
MOST_AT_ONCE = 256
"""Traces of one request to the collector."""
LINGER_SECONDS = 0.5
"""Time for further traces to come, after the first one, before a request is made."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits until the traces are sent."""
DEAD_SECONDS = 2.0
"""How long it waits where none was ever taken."""


class Exporter(Protocol):
    """Whatever sends traces somewhere; it may raise."""

    def export(self, traces: Sequence[TraceSpan]) -> None:
        """Send whole traces."""

    def close(self) -> None:
        """Send what is held back, and let go."""


class TraceQueue:
    """Sends traces in a thread of its own; `sent` and `lost` count them."""

    def __init__(self, name: str, build: Callable[[], Exporter], decode: Decode | None = None) -> None:
        """The thread, which begins with the first trace, builds the exporter. `decode` turns token ids into
        text; None: traces have no texts.
        """
        self.name = name
        self.sent = 0
        self.lost = 0
        self.takes_texts = decode is not None
        self._decode = decode
        self._waiting: queue.Queue[TraceSpan] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._work, args=(build,), name=f"traces {name}", daemon=True)
        self._given = 0

    def put(self, trace: TraceSpan) -> None:
        """Have a trace sent, or drop and count it where too many wait."""
        with self._counting:
            self._given += 1
            if not self._thread.ident:
                self._thread.start()
        try:
            self._waiting.put_nowait(trace)
        except queue.Full:
            self._lose(1, f"{MOST_WAITING} traces wait already")

    def close(self) -> None:
        """Wait at most CLOSE_SECONDS until all is sent; tell what was not."""
        if not self._thread.ident:
            return
        self._closing.set()
        seconds = CLOSE_SECONDS
        if self.lost and not self.sent:
            seconds = DEAD_SECONDS
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._lose(self._given - self.sent - self.lost, f"they were not taken within {seconds:g} s")
        if self.lost:
            logger.warning("%s took %d traces of this run, and %d are lost", self.name, self.sent, self.lost)

    def _work(self, build: Callable[[], Exporter]) -> None:
        exporter: Exporter | None = None
        reason = ""
        try:
            exporter = build()
        except (Exception, SystemExit) as error:  # a library's own: an address, the network, its interface
            reason = f"{type(error).__name__}: {error}"
        while (traces := self._next()) or not self._closing.is_set():
            if exporter is None:
                self._lose(len(traces), reason)
            elif not self._sends(exporter, traces) and self._closing.is_set():
                self._lose(self._waiting.qsize(), "the run has ended")
                break
        if exporter is not None:
            try:
                exporter.close()
            except (Exception, SystemExit) as error:
                self._lose(0, f"{type(error).__name__}: {error}")

    def _next(self) -> list[TraceSpan]:
        """Return the traces of one request; none where none has come for a while."""
        traces: list[TraceSpan] = []
        try:
            traces.append(self._waiting.get(timeout=LINGER_SECONDS))
            self._closing.wait(LINGER_SECONDS)
            while len(traces) < MOST_AT_ONCE:
                traces.append(self._waiting.get_nowait())
        except queue.Empty:
            pass
        return traces

    def _sends(self, exporter: Exporter, traces: list[TraceSpan]) -> bool:
        """Send traces, or lose them; return which."""
        if not traces:
            return True
        try:
            exporter.export([self._with_texts(trace) for trace in traces])
        except (Exception, SystemExit) as error:  # whatever a library or a tokenizer raises
            self._lose(len(traces), f"{type(error).__name__}: {error}")
            return False
        self.sent += len(traces)
        return True

    def _with_texts(self, span: TraceSpan) -> TraceSpan:
        """Return a span with texts as attributes, where they are wanted, and no token ids."""
        decode = self._decode
        attributes = dict(span.attributes)
        if decode is not None:
            for name, text in span.texts.items():
                attributes[name] = text if isinstance(text, str) else decode(text)
        children = tuple(self._with_texts(child) for child in span.children)
        return replace(span, attributes=attributes, texts={}, children=children)

    def _lose(self, count: int, why: str) -> None:
        with self._counting:
            first = not self.lost
            self.lost += count
        if first and count:
            logger.warning(
                "traces for %s (actor_rollout_ref.rollout.trace.backend) are lost: %s. The run goes on; "
                "further ones are counted, and told at its end",
                self.name,
                why,
            )
