"""vLLM's engine in this process, without a server and without copies of pushed weights. It is for a run in
which one process generates.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from hybridflow.distributed.device import num_devices, used_accelerator
from hybridflow.errors import RolloutError
from hybridflow.rollout.installed import advice
from hybridflow.rollout.remote.runner import EngineDied, ResponsePiece, Submission
from hybridflow.rollout.vllm.engine import ExtendedRunner, with_our_end
from hybridflow.rollout.vllm.extension import ADAPTER_ID, ADAPTER_NAME
from hybridflow.rollout.vllm.settings import ENVIRONMENT
from hybridflow.weight_sync.wire.receiver import Part, Weights
from hybridflow.weight_sync.wire.sender import checked


class InProcess(ExtendedRunner):
    """An `EngineRunner` over vLLM's `LLMEngine`, made from `arguments` (`engine_arguments`)."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            os.environ.setdefault(name, value)
        try:
            import vllm
            import vllm.lora.request
        except ImportError as error:
            raise RolloutError(
                f"actor_rollout_ref.rollout.name=vllm needs vllm, which cannot be imported: {error}. "
                f"{advice('vllm')}"
            ) from error
        self._vllm = vllm
        try:
            with _process_as_it_was():
                self._engine = vllm.LLMEngine.from_engine_args(
                    vllm.EngineArgs(**arguments, disable_log_stats=True)
                )
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            raise RolloutError(
                f"vllm could not start with model {arguments['model']!r}: {_first_lines(error)}"
            ) from error
        self._running: set[str] = set()
        """vLLM's names of the requests that run: their ids as text."""
        self._death: str | None = None
        self._adapter: Any = None
        """Adapter that each request asks for, where adapters are pushed."""
        if arguments.get("enable_lora"):
            nowhere = "no folder: it was pushed"  # where vLLM would look for an adapter that it does not have
            self._adapter = vllm.lora.request.LoRARequest(ADAPTER_NAME, ADAPTER_ID, nowhere)

    @property
    def name(self) -> str:
        """The engine's name for messages."""
        return f"vllm {self._vllm.__version__} in process {os.getpid()}"

    def facts(self) -> dict[str, Any]:
        """Return the worker's facts."""
        facts: dict[str, Any] = self._call("hybridflow_begin")[0]
        return facts

    def start(self, submissions: Sequence[Submission]) -> None:
        """Queue these requests; raises EngineDied."""
        self._alive()
        for submission in submissions:
            params = self._vllm.SamplingParams(
                **submission.params,
                detokenize="stop" in submission.params,
                output_kind=self._vllm.sampling_params.RequestOutputKind.DELTA,
            )
            prompt = {"prompt_token_ids": list(submission.prompt)}
            try:
                self._engine.add_request(
                    str(submission.request_id), prompt, params, lora_request=self._adapter
                )
            except Exception as error:  # whatever vLLM has against it: it answers no more
                raise self._died(error) from error
            self._running.add(str(submission.request_id))

    def poll(self) -> list[ResponsePiece]:
        """Run one step of the engine; raises EngineDied."""
        self._alive()
        try:
            outputs = self._engine.step()
        except Exception as error:
            raise self._died(error) from error
        pieces = []
        for output in outputs:
            if output.request_id not in self._running:  # aborted meanwhile
                continue
            pieces.append(_piece(int(output.request_id), output.outputs[0]))
            if pieces[-1].finish is not None:
                self._running.discard(output.request_id)
        return pieces

    def abort(self, request_ids: Iterable[int]) -> None:
        """Stop these requests."""
        names = [str(request_id) for request_id in request_ids]
        self._running.difference_update(names)
        if self._death is None:
            self._engine.abort_request(names)

    def push(
        self, weights: Weights, version: int, part: Part = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        """Push weights to the worker and empty the prefix cache; RolloutError where they did not arrive."""
        self._alive()
        try:
            self._call("hybridflow_take", checked(weights), version, part, adapter)
        except RolloutError:
            raise
        except Exception as error:  # in vLLM's own loading: the state of its layers is unknown now
            raise self._died(error) from error
        if not self._engine.reset_prefix_cache():
            raise RolloutError(
                f"{self.name} could not empty its prefix cache after a push of weights: are requests running?"
            )

    def sleep(self, level: int) -> None:
        """Give memory back."""
        if level > 1:
            self._call("hybridflow_forget")
        self._engine.sleep(level)

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again; `tags` names its parts."""
        self._engine.wake_up(list(tags))

    def close(self) -> None:
        """End the engine."""
        if self._death is None:
            self._death = "it was closed"
            self._engine.engine_core.shutdown()

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._engine.collective_rpc(method, args=arguments)
        return answers

    def _alive(self) -> None:
        if self._death is not None:
            raise EngineDied(f"{self.name} died earlier: {self._death}")

    def _died(self, error: Exception) -> EngineDied:
        self._death = f"{type(error).__name__}: {_first_lines(error)}"
        return EngineDied(f"{self.name} died: {self._death}")


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restore random states and the number of threads, which vLLM's worker changes for the whole process."""
    set_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    randoms = random.getstate()
    numpy_randoms = np.random.get_state()
    used = used_accelerator()
    kind = "cpu"  # whose random state is always kept
    devices = range(0)
    if used is not None:
        kind = used.type
        devices = range(num_devices(kind))
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(randoms)
        np.random.set_state(numpy_randoms)


def _piece(request_id: int, new: Any) -> ResponsePiece:
    """Return the new part of one request's response."""
    ids = list(new.token_ids)
    log_probs = []
    top = []
    for token, place in zip(ids, new.logprobs or ()):
        log_probs.append(place[token].logprob)
        ranked = sorted(place.items(), key=lambda item: item[1].rank)
        top.append([(number, each.logprob) for number, each in ranked])
    return with_our_end(ResponsePiece(request_id, ids, log_probs, top, new.finish_reason, new.stop_reason))


def _first_lines(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
