"""A runner over vLLM's server, which was started here or runs already.

VLLMEngine ──requests, one connection each──► /v1/completions
           ──version, begin, receive────────► /collective_rpc ──► `Extension` in the server's workers
           ◄──weights── push
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from hybridflow.errors import RolloutError
from hybridflow.rollout.push.receiver import Part
from hybridflow.rollout.push.sender import Transport
from hybridflow.rollout.remote.http import Address, Refused
from hybridflow.rollout.remote.process import ServerProcess
from hybridflow.rollout.remote.runner import Submission
from hybridflow.rollout.remote.served import Served
from hybridflow.rollout.vllm.extension import ADAPTER_NAME, QUALIFIED_NAME
from hybridflow.rollout.vllm.http import MODEL, Stream, open_stream


class Server(Served):
    """A `Runner` over a vLLM server."""

    engine = "vllm"

    def __init__(
        self,
        address: Address,
        process: ServerProcess | None,
        *,
        max_streams: int,
        timeout: float,
        transport: Transport | None = None,
        bucket_bytes: int,
        adapters: bool = False,
    ) -> None:
        super().__init__(
            address,
            process,
            max_streams=max_streams,
            timeout=timeout,
            transport=transport,
            bucket_bytes=bucket_bytes,
        )
        self._model = MODEL if process is not None else self._served_model()
        self._workers = 1
        self._adapters = adapters

    def facts(self) -> dict[str, Any]:
        """Return the workers' facts; RolloutError where they lack the extension."""
        try:
            found = self._call("hybridflow_begin", {})
        except Refused as error:
            raise RolloutError(
                f"{self.name} does not take our calls ({error}): start it with VLLM_SERVER_DEV_MODE=1, "
                "VLLM_USE_V2_MODEL_RUNNER=0, "
                f"--worker-extension-cls {QUALIFIED_NAME} and --logprobs-mode processed_logprobs, in a "
                "python that has hybridflow"
            ) from error
        self._workers = len(found)
        if self._adapters:
            self._name_adapter()
        facts: dict[str, Any] = found[0]
        return facts

    def _name_adapter(self) -> None:
        """Let the server know the adapter's name; its weights and the base are pushed later."""
        self._call("hybridflow_forget", {})  # what is below those of an earlier run may be another model
        body = {
            "lora_name": ADAPTER_NAME,
            "lora_path": self._call("hybridflow_empty_adapter", {})[0]["folder"],
        }
        try:
            try:
                self._ask_for_adapter("load", body)
            except Refused:  # an earlier run's may have the name
                with suppress(Refused):
                    self._ask_for_adapter("unload", {"lora_name": ADAPTER_NAME})
                self._ask_for_adapter("load", body)
        except Refused as error:
            raise RolloutError(
                f"{self.name} does not take adapters ({error}): start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and a "
                "--max-lora-rank as large as the adapters', or set "
                "actor_rollout_ref.rollout.lora_as_adapters=false"
            ) from error
        finally:
            if self._death is None:
                self._call("hybridflow_adapter_ready", {})
        self._model = ADAPTER_NAME

    def _ask_for_adapter(self, what: str, body: dict[str, str]) -> None:
        self._guarded(
            lambda: self.address.call(f"/v1/{what}_lora_adapter", body, timeout=self.timeout, text=True)
        )

    def version(self) -> int:
        """Return the version of the weights in the server's workers."""
        return min(int(answer["version"]) for answer in self._call("hybridflow_version", {}))

    def open(self, submission: Submission) -> Stream:
        """Begin a completion; raises ServerGone."""
        return open_stream(self.address, submission, self._model, timeout=self.timeout)

    def has_base(self) -> bool:
        """Return whether adapters may be pushed."""
        return all(answer["has_base"] for answer in self._call("hybridflow_version", {}))

    def push(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        part: Part = "whole",
        adapter: dict[str, Any] | None = None,
    ) -> None:
        """Push weights to all workers in buckets and empty the prefix cache; RolloutError where they did not
        arrive.
        """
        self._alive()
        self._push(self._call, weights, version, self._workers, part=part, adapter=adapter)
        emptied = self._guarded(lambda: self.address.call("/reset_prefix_cache", {}, timeout=self.timeout))
        if isinstance(emptied, dict) and not emptied.get("success", True):
            raise RolloutError(
                f"{self.name} could not empty its prefix cache after a push of weights: does someone else "
                "use it?"
            )

    def sleep(self, level: int) -> None:
        """Give memory back."""
        if level > 1:
            self._call("hybridflow_forget", {})
        self._guarded(lambda: self.address.call(f"/sleep?level={level}", timeout=self.timeout))

    def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory again; `tags` names its parts, None for all."""
        query = "?" + "&".join(f"tags={tag}" for tag in tags) if tags else ""
        self._guarded(lambda: self.address.call(f"/wake_up{query}", timeout=self.timeout))

    def _served_model(self) -> str:
        listed = self._guarded(lambda: self.address.call("/v1/models", timeout=self.timeout, method="GET"))
        return str(listed["data"][0]["id"])

    def _call(self, method: str, argument: dict[str, Any]) -> list[Any]:
        body = {"method": method, "args": [argument] if argument else []}
        answers: list[Any] = self._guarded(
            lambda: self.address.call("/collective_rpc", body, timeout=self.timeout)
        )["results"]
        return answers
