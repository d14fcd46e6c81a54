"""A runner over vLLM's server, which was started here or runs already.

VLLMEngine ──requests, one connection each──► /v1/completions
           ──version, begin, receive────────► /collective_rpc ──► `Extension` in the server's workers
           ◄──weights── push
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hybridflow.errors import RolloutError
from hybridflow.rollout.remote.http import Refused
from hybridflow.rollout.remote.runner import ResponsePiece, Submission
from hybridflow.rollout.remote.served import Served, Stream
from hybridflow.rollout.vllm.engine import ExtendedRunner, with_our_end
from hybridflow.rollout.vllm.extension import ADAPTER_NAME, QUALIFIED_NAME
from hybridflow.rollout.vllm.settings import MODEL
from hybridflow.weight_sync.wire.receiver import Part, Weights


@dataclass(eq=False)
class VLLMServer(Served, ExtendedRunner):
    """An `EngineRunner` over a vLLM server. `adapters`: whether LoRA adapters will be pushed."""

    engine = "vllm"
    adapters: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._model = MODEL
        if self.process is None:
            self._model = str(self._get("/v1/models")["data"][0]["id"])

    def facts(self) -> dict[str, Any]:
        """Return the workers' facts; RolloutError where they lack the extension."""
        try:
            found = self._call("hybridflow_begin")
        except Refused as error:
            raise RolloutError(
                f"{self.name} does not take our calls ({error}): start it with VLLM_SERVER_DEV_MODE=1, "
                f"VLLM_USE_V2_MODEL_RUNNER=0, --worker-extension-cls {QUALIFIED_NAME} and --logprobs-mode "
                "processed_logprobs, in a python that has hybridflow"
            ) from error
        self._workers = len(found)
        if self.adapters:
            self._name_adapter()
        facts: dict[str, Any] = found[0]
        return facts

    def _name_adapter(self) -> None:
        """Register the adapter's name with the server; its weights and the base are pushed later."""
        self._call("hybridflow_forget")  # what is below those of an earlier run may be another model
        folder = self._call("hybridflow_empty_adapter")[0]["folder"]
        body = {"lora_name": ADAPTER_NAME, "lora_path": folder}
        try:
            try:
                self._post("/v1/load_lora_adapter", body)
            except Refused:  # an earlier run's may have the name
                with suppress(Refused):
                    self._post("/v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
                self._post("/v1/load_lora_adapter", body)
        except Refused as error:
            raise RolloutError(
                f"{self.name} does not take adapters ({error}): start it with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and a --max-lora-rank as large as the "
                "adapters', or set actor_rollout_ref.rollout.lora_as_adapters=false"
            ) from error
        finally:
            if self._death is None:
                self._call("hybridflow_adapter_ready")
        self._model = ADAPTER_NAME

    def open(self, submission: Submission) -> Stream:
        """Begin a completion; raises ServerGone."""
        body = {
            **submission.params,
            "model": self._model,
            "prompt": list(submission.prompt),
            "stream": True,
            "add_special_tokens": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        call = self.address.begin("/v1/completions", body, timeout=self.timeout)
        return Stream(call, partial(_piece, submission))

    def push(
        self, weights: Weights, version: int, part: Part = "whole", adapter: dict[str, Any] | None = None
    ) -> None:
        """Push weights to all workers and empty the prefix cache; RolloutError where they did not arrive."""
        self._alive()
        self._push(self._call, weights, version, part=part, adapter=adapter)
        emptied = self._post("/reset_prefix_cache", {})
        if emptied and not json.loads(emptied).get("success", True):
            raise RolloutError(
                f"{self.name} could not empty its prefix cache after a push of weights: does someone else "
                "use it?"
            )

    def sleep(self, level: int) -> None:
        """Give memory back."""
        if level > 1:
            self._call("hybridflow_forget")
        self._post(f"/sleep?level={level}")

    def wake_up(self, tags: Sequence[str]) -> None:
        """Take memory again; `tags` names its parts."""
        self._post("/wake_up?" + "&".join(f"tags={tag}" for tag in tags))

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        body = {"method": method, "args": list(arguments)}
        answers: list[Any] = json.loads(self._post("/collective_rpc", body))["results"]
        return answers


def _piece(submission: Submission, event: dict[str, Any]) -> ResponsePiece | None:
    """Return what an event of a stream adds to the response."""
    if not event["choices"]:
        return None
    choice = event["choices"][0]
    finish = choice.get("finish_reason")
    scores = choice.get("logprobs") or {}
    ids = choice.get("token_ids") or []
    log_probs = scores.get("token_logprobs") or []
    if len(ids) != len(log_probs):
        told = f"vllm sent {len(ids)} tokens and {len(log_probs)} log-probs"
        return ResponsePiece.failed(submission.request_id, told)
    top = []
    if submission.params.get("logprobs"):
        top = [_ranked(place) for place in scores.get("top_logprobs") or []]
    piece = ResponsePiece(submission.request_id, ids, log_probs, top, finish, choice.get("stop_reason"))
    return with_our_end(piece)


def _ranked(place: dict[str, float]) -> list[tuple[int, float]]:
    """Return {"token_id:17": -0.1, …} as pairs, the most probable first."""
    found = [(int(name.removeprefix("token_id:")), value) for name, value in place.items()]
    return sorted(found, key=lambda each: -each[1])
