"""The server as a process: built from its settings, and its end."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn

from hybridflow.rollout.server.build import served_device
from hybridflow.rollout.server.run import server_config
from hybridflow.tinker.app import build_tinker_app
from hybridflow.tinker.model import SharedBase
from hybridflow.tinker.service import TinkerService
from hybridflow.tinker.store import Store

GRACE_S = 5
"""Seconds that requests have at the end; what was not saved is lost."""


@dataclass(frozen=True)
class TinkerSettings:
    """Settings of `hybridflow tinker`."""

    model: str
    """A Hugging Face folder or a hub name."""
    name: str
    """Name of the base in requests."""
    folder: Path
    """Sessions and checkpoints."""
    device: str = "auto"
    dtype: str = "auto"
    max_runs: int = 16
    """Training runs in memory."""
    max_rows: int = 256
    """Responses that are decoded together."""
    pass_tokens: int = 8192
    """Most tokens of a training pass, unless one row has more."""
    memory_share: float = 0.25
    """Share of the free memory for keys and values."""


def build(settings: TinkerSettings) -> TinkerService:
    """Open the folder, load the model, start its thread; ConfigError or ModelError where that cannot be."""
    device = served_device(settings.device)
    store = Store(settings.folder)
    base = SharedBase(
        settings.model,
        device=device,
        dtype=settings.dtype,
        pass_tokens=settings.pass_tokens,
        max_rows=settings.max_rows,
        memory_share=settings.memory_share,
    )
    return TinkerService(base, store, settings.name, settings.model, max_runs=settings.max_runs)


class EndingServer(uvicorn.Server):
    """Server whose end by a signal is the end of its loop, and no signal once more."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End when running requests are answered; a second signal ends at once."""
        self.force_exit = self.should_exit
        self.should_exit = True


def serve(service: TinkerService, bound: socket.socket, key: str | None) -> None:
    """Serve until SIGINT or SIGTERM; then answer what is done within a few seconds, and end."""
    try:
        EndingServer(server_config(build_tinker_app(service, key=key), GRACE_S)).run([bound])
    finally:
        service.close()
