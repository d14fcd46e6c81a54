"""vLLM's own server as a process that is started here."""

from __future__ import annotations

import os
import sys
from typing import Any

from hybridflow.rollout.remote.http import Address
from hybridflow.rollout.remote.process import ServerProcess, free_port
from hybridflow.rollout.vllm.http import MODEL
from hybridflow.rollout.vllm.settings import ENVIRONMENT, command_line


def start_server(
    arguments: dict[str, Any], *, python: str | None, timeout: float
) -> tuple[Address, ServerProcess]:
    """Start vLLM's OpenAI server on a free port that only this machine reaches; RolloutError where it does
    not start.
    """
    port = free_port()
    command = [
        python or sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)),
        *("--served-model-name", MODEL, "--disable-log-stats", *command_line(arguments)),
    ]
    # /collective_rpc, /reset_prefix_cache, /sleep; /v1/load_lora_adapter
    dev_mode = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    process = ServerProcess(command, {**ENVIRONMENT, **os.environ, **dev_mode}, engine="vllm")
    address = Address(f"http://127.0.0.1:{port}")
    process.wait_until_ready(address, timeout)
    return address, process
