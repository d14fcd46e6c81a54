"""Sends advice on a run to an address, for a chat or an alert manager (`trainer.alert_webhook`)."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from hybridflow.observability.advice import Advice
from hybridflow.observability.trackers.base import RunInfo, Tracker

TIMEOUT_SECONDS = 10.0


class WebhookTracker(Tracker):
    """Posts JSON with `text`, which chats show, and with the same in parts."""

    def __init__(self, run: RunInfo) -> None:
        assert run.alert_webhook is not None, "it is built where there is an address"
        self._address = run.alert_webhook
        self._run = {"project": run.project, "experiment": run.experiment, "run_dir": str(run.run_dir)}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send nothing: metrics go to the other trackers."""

    def alert(self, advice: Advice, step: int) -> None:
        parts = {"step": step, "rule": advice.rule, "message": advice.message, "keys": list(advice.keys)}
        text = f"{self._run['project']}/{self._run['experiment']}, step {step}: {advice}"
        answer = httpx.post(self._address, json={"text": text, **self._run, **parts}, timeout=TIMEOUT_SECONDS)
        answer.raise_for_status()
