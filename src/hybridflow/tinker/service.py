"""Sessions and training runs of clients, and the one thread that computes for them all.

request ──submit (by number, in order)──► queue ──the model's thread──► answer, kept until it is fetched

Requests of a run are numbered by its client and done in this order, whatever the order they arrive in; a
number that comes twice is done once. Sampling of the same weights is done together.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridflow.errors import HybridFlowError
from hybridflow.models.adapters.slots import Adapter
from hybridflow.tinker.model import LoraSpec, Sampling, SharedBase, Trained
from hybridflow.tinker.store import SAMPLER, WEIGHTS, Facts, Store, expiry, now
from hybridflow.tinker.wire import Refusal, write_samples

logger = logging.getLogger(__name__)
Answer = dict[str, Any] | bytes
"""What a client gets: JSON, or a message of `wire.py`."""
ADAPTER_FACTS = ("rank", "train_attn", "train_mlp")
"""What a checkpoint says of its adapter."""
ANSWER_S = 600.0
"""Seconds that an answer is kept after it is there."""
GAP_S = 60.0
"""Seconds that a request waits for those of its run with lower numbers."""
SILENT_S = 600.0
"""Seconds without a sign of its session after which a run may lose its place to another."""
KEPT_SAMPLERS = 8
"""Sampler weights in memory; others are read again."""
KEPT_UNNAMED = 16
"""Sampler weights without a name that a run has on disk."""


class Unknown(Refusal):
    """A name that is none of this server's."""

    status = 404


@dataclass
class AdapterRun:
    """A training run."""

    facts: Facts
    """What its file has."""
    next_seq: int = 0
    """Number of the request that is done next."""
    waiting: dict[int, tuple[QueuedRequest, float]] = field(default_factory=dict)
    """Requests that came before one of a lower number, and when."""
    trained: Trained | None = None
    """Its weights; None before they are made, read or once they were dropped."""
    ended: str | None = None
    """Why it cannot go on."""
    last_request: str | None = None
    """When its last request came; None since the server began."""


@dataclass
class QueuedRequest:
    """One thing to compute."""

    request_id: str
    work: Callable[[], Answer] | None = None
    sampling: Sampling | None = None
    sampler: str | None = None
    """Address of the weights to sample with; None: the base."""
    answer: Future[Answer] = field(default_factory=Future)
    done_at: float = float("inf")


class TinkerService:
    """The state of a server."""

    def __init__(self, base: SharedBase, store: Store, name: str, folder: str, *, max_runs: int = 16) -> None:
        self.base = base
        self.store = store
        self.name = name
        self.folder = folder
        self.max_runs = max_runs
        self.sessions: Facts = store.known["sessions"]
        self.samplers: Facts = store.known["samplers"]
        self.runs = {facts["model_id"]: self._resumed(facts) for facts in store.runs}
        self._heard: dict[str, float] = {}
        self._jobs: OrderedDict[str, QueuedRequest] = OrderedDict()
        self._queue: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._loaded: OrderedDict[str, tuple[Adapter, int]] = OrderedDict()
        self._num_loaded = 0
        self._thread = threading.Thread(target=self._serve, name="tinker-model", daemon=True)
        self._thread.start()

    def _resumed(self, facts: Facts) -> AdapterRun:
        saved = facts.get("saved")
        if saved is None:
            return AdapterRun(
                facts, ended="the server began anew, and nothing of this run was saved with save_state"
            )
        return AdapterRun(facts, next_seq=saved["seq"] + 1)

    def close(self, seconds: float = 10.0) -> None:
        """End the thread after what it does now, and let another server have the folder."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(seconds)
        self.store.close()

    # sessions

    def create_session(self, facts: Facts) -> str:
        """Make a session and return its name."""
        session = secrets.token_hex(8)
        self._note(self.sessions, session, {**facts, "created": now()})
        return session

    def hear(self, session: str) -> None:
        """Note a sign of life; Unknown for a session of another server."""
        if session not in self.sessions:
            raise Unknown(f"there is no session {session!r} here")
        self._heard[session] = time.monotonic()

    def finish_session(self, session: str) -> None:
        """Free what the runs of a session have in memory; what they saved stays."""
        self.hear(session)
        for run in list(self.runs.values()):
            if run.facts["session_id"] == session:
                run.ended = "its session has ended"
                run.trained = None

    def create_sampler(
        self, session: str, number: int, address: str | None, *, base: str | None = None
    ) -> str:
        """Make a sampling session for weights, or the base, and return its name."""
        self.hear(session)
        if address is None or base is not None:
            self.check_name(base)
        if address is not None:
            self.store.find(address)
        sampler = f"{session}:sample:{number}"
        self._note(self.samplers, sampler, {"model_path": address})
        return sampler

    def sampler(self, name: str) -> Facts:
        """Return the facts of a sampling session; Unknown where there is none."""
        if name not in self.samplers:
            raise Unknown(f"there is no sampling session {name!r} here")
        facts: Facts = self.samplers[name]
        return facts

    def told_session(self, session: str) -> Facts:
        """Return what a client may know of a session; Unknown where there is none."""
        if session not in self.sessions:
            raise Unknown(f"there is no session {session!r} here")
        facts = self.sessions[session]
        return {
            "training_run_ids": [
                name for name, run in self.runs.items() if run.facts["session_id"] == session
            ],
            "sampler_ids": [name for name in list(self.samplers) if name.startswith(f"{session}:")],
            "user_metadata": facts["user_metadata"],
            "display_name": facts["display_name"],
        }

    def told_run(self, model_id: str) -> Facts:
        """Return what a client may know of a training run; Unknown where there is none."""
        if model_id not in self.runs:
            raise Unknown(f"there is no training run {model_id!r} here")
        facts = self.runs[model_id].facts
        checkpoints = self.store.checkpoints(model_id)
        newest = {each["checkpoint_type"]: each for each in reversed(checkpoints)}
        known = checkpoints[0]["time"] if checkpoints else facts["created"]
        return {
            "training_run_id": model_id,
            "base_model": self.name,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": facts["rank"],
            "last_request_time": self.runs[model_id].last_request or known,
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": facts["user_metadata"],
        }

    def _note(self, table: Facts, name: str, facts: Facts) -> None:
        with self._changed:  # both threads make samplers
            table[name] = facts
            self.store.write_sessions({"sessions": self.sessions, "samplers": self.samplers})

    def check_name(self, name: str | None) -> None:
        """Raise Refusal for a base model that is not the served one."""
        if name not in (self.name, self.folder):
            raise Refusal(f"base_model={name!r} is not served here, only {self.name!r}")

    # training runs

    def run_of(self, model_id: str) -> AdapterRun:
        """Return a run by its name; Unknown where there is none, or it has ended."""
        run = self.runs.get(model_id)
        if run is None:
            raise Unknown(f"there is no training run {model_id!r} here")
        self._heard[run.facts["session_id"]] = time.monotonic()
        if run.ended is not None:
            saved = [each["tinker_path"] for each in self.store.checkpoints(model_id)]
            told = (
                f"create a training client from one of {', '.join(saved[:3])}" if saved else "begin a new one"
            )
            raise Unknown(f"the training run {model_id} cannot go on: {run.ended}; {told}")
        return run

    def create_run(
        self,
        session: str,
        number: int,
        spec: LoraSpec | None,
        metadata: Any,
        source: tuple[str, bool] | None = None,
    ) -> str:
        """Begin a run with a new adapter, or with that of a checkpoint (its address, and whether with the
        optimizer's state), and return the id of the request.
        """
        self.hear(session)
        model_id = f"{session}:train:{number}"
        if model_id not in self.runs:
            if source is not None:
                facts = self.store.facts(source[0])
                spec = LoraSpec(facts["rank"], 0, facts["train_attn"], facts["train_mlp"])
            assert spec is not None, "a run without a source has a spec"
            self._make_place()
            facts = {"model_id": model_id, "session_id": session, "created": now(), "user_metadata": metadata}
            run = AdapterRun({**facts, **vars(spec)})

            def begin() -> Answer:
                try:
                    run.trained = self.base.new_run(spec) if source is None else self.read(*source)
                except Exception as error:
                    run.ended = f"it could not begin: {error}"
                    raise
                kind = "create_model" if source is None else "load_weights"
                return {"type": kind, "model_id": model_id, "path": source[0] if source else None}

            self.store.write_run(run.facts)
            self.runs[model_id] = run
            return self._submit(run, 0, begin)
        return f"{model_id}:0"

    def _make_place(self) -> None:
        """Drop the run whose session is silent longest where there are `max_runs`; Refusal where none is."""
        live = [
            run
            for run in self.runs.values()
            if run.ended is None and (run.trained is not None or "saved" not in run.facts)
        ]
        if len(live) < self.max_runs:
            return
        oldest = min(live, key=lambda run: self._heard[run.facts["session_id"]])
        if time.monotonic() - self._heard[oldest.facts["session_id"]] < SILENT_S:
            raise Refusal(
                f"{len(live)} training runs are in memory (--max-runs): end a session first "
                "(ServiceClient.close)"
            )
        oldest.ended = f"its session was silent for {SILENT_S:g} s, and its place was needed"
        oldest.trained = None

    def read(self, address: str, optimizer: bool) -> Trained:
        """Return a run's weights from a checkpoint, in the model's thread; Refusal where there is none."""
        return self.base.read(
            self.store.find(address, (WEIGHTS,) if optimizer else (WEIGHTS, SAMPLER)), optimizer=optimizer
        )

    def submit(self, model_id: str, seq: int, work: Callable[[AdapterRun, Trained], Answer]) -> str:
        """Queue the request `seq` of a run and return its id; Unknown where the run cannot go on."""
        run = self.run_of(model_id)

        def done() -> Answer:
            if run.trained is None:
                if run.ended is not None:
                    raise Refusal(f"the training run {model_id} cannot go on: {run.ended}")
                self._make_place()
                run.trained = self.read(run.facts["saved"]["path"], True)
            return work(run, run.trained)

        return self._submit(run, seq, done)

    def refuse(self, model_id: str, seq: int, problem: str) -> str:
        """Let a request that cannot be read count as done, since its client has spent the number, and return
        the id of its answer, which is the problem; Unknown where the run cannot go on.
        """

        def refused() -> Answer:
            raise Refusal(problem)

        return self._submit(self.run_of(model_id), seq, refused)

    def _submit(self, run: AdapterRun, seq: int, work: Callable[[], Answer]) -> str:
        run.last_request = now()
        job = QueuedRequest(f"{run.facts['model_id']}:{seq}", work)
        with self._changed:
            if job.request_id in self._jobs:  # the client did not hear the first answer
                return job.request_id
            self._keep(job)
            if seq < run.next_seq:
                self._fail(job, f"the answer to request {seq} is no longer kept, or the server began anew")
                return job.request_id
            run.waiting[seq] = (job, time.monotonic())
            while run.next_seq in run.waiting:
                self._queue.append(run.waiting.pop(run.next_seq)[0])
                run.next_seq += 1
            self._changed.notify()
        return job.request_id

    def save(
        self, run: AdapterRun, trained: Trained, seq: int, kind: str, name: str | None, body: Any
    ) -> str:
        """Write a checkpoint of a run, in the model's thread, and return its address."""
        facts = {key: run.facts[key] for key in ADAPTER_FACTS}
        facts |= {"time": now(), "expires_at": expiry(body.ttl_seconds), "user_metadata": body.user_metadata}
        model_id = run.facts["model_id"]

        def fill(folder: Path) -> None:
            self.base.write(trained, folder, optimizer=kind == WEIGHTS)

        address = self.store.save(model_id, kind, name, seq, facts, fill, overwrite=body.overwrite)
        self._loaded.pop(address, None)
        if kind == WEIGHTS:
            run.facts["saved"] = {"seq": seq, "path": address}
            self.store.write_run(run.facts)
        elif name is None:
            self.store.forget_unnamed(model_id, KEPT_UNNAMED)
        return address

    # sampling

    def sample(self, request_id: str, sampler: str | None, sampling: Sampling, top: int) -> None:
        """Queue a request for responses with the weights at an address, or the base's."""
        job = QueuedRequest(request_id, sampling=sampling, sampler=sampler)

        def finish(asked: Sampling, problem: str | None) -> None:
            with self._changed:
                if problem is not None:
                    self._fail(job, problem)
                else:
                    outputs = [asked.outputs[place] for place in range(asked.count)]
                    self._answer(job, write_samples(outputs, asked.prompt_log_probs, top))

        sampling.finish = finish
        with self._changed:
            if request_id not in self._jobs:
                self._keep(job)
                self._queue.append(job)
                self._changed.notify()

    def _sample(self, first: QueuedRequest) -> None:
        """Serve a request for samples, and those for the same weights that are next in the queue."""
        adapter: Adapter | None = None
        version = 0
        if first.sampler is not None:
            folder = self.store.find(first.sampler)
            if first.sampler not in self._loaded:
                adapter = self.base.slots.read(folder)
                self._num_loaded += 1
                self._loaded[first.sampler] = (adapter, self._num_loaded)
                if len(self._loaded) > KEPT_SAMPLERS:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(first.sampler)
            adapter, version = self._loaded[first.sampler]
        begun = [first]

        def take() -> list[Sampling]:
            with self._changed:
                while self._queue and self._queue[0].sampling and self._queue[0].sampler == first.sampler:
                    begun.append(self._queue.popleft())
            taken = [job.sampling for job in begun if job.sampling is not None]
            begun.clear()
            return taken

        self.base.sample(adapter, version, take)

    # answers

    def job(self, request_id: str) -> QueuedRequest | None:
        """Return a request that was submitted, while its answer is kept."""
        return self._jobs.get(request_id)

    def _keep(self, job: QueuedRequest) -> None:
        self._jobs[job.request_id] = job
        ends = time.monotonic() - ANSWER_S
        for old in [key for key, each in self._jobs.items() if each.done_at < ends]:
            del self._jobs[old]

    def _answer(self, job: QueuedRequest, answer: Answer) -> None:
        job.done_at = time.monotonic()
        if not job.answer.done():
            job.answer.set_result(answer)

    def _fail(self, job: QueuedRequest, problem: str, category: str = "user") -> None:
        self._answer(job, {"error": problem, "category": category})

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            try:
                if job.work is None:
                    self._sample(job)
                else:
                    self._answer(job, job.work())
            except (Refusal, HybridFlowError) as error:
                self._fail(job, str(error))
            except Exception as error:  # one bad request never ends the server
                logger.exception("the request %s failed", job.request_id)
                self._fail(job, f"the server failed: {type(error).__name__}: {error}", "server")

    def _next(self) -> QueuedRequest | None:
        """Return the next thing to compute, None at the end, and fail requests whose turn does not come."""
        with self._changed:
            while True:
                late = time.monotonic() - GAP_S
                for run in list(self.runs.values()):
                    for seq in [seq for seq, (_, came) in run.waiting.items() if came < late]:
                        self._fail(
                            run.waiting.pop(seq)[0],
                            f"request {seq} of the run waits for {run.next_seq}, which did not come within "
                            f"{GAP_S:g} s. Where the server began anew, or refused a request unread (413): "
                            "create a training client from the newest saved state",
                        )
                if self._closing or self._queue:
                    return None if self._closing else self._queue.popleft()
                self._changed.wait(1.0)
