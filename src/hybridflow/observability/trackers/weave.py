"""Weave, for reading samples: a call for each step and each validation sample. It has no offline mode."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from hybridflow.observability.trackers.base import (
    Outcome,
    RunInfo,
    SampleRow,
    Tracker,
    import_extra,
    remembered_id,
)


class WeaveTracker(Tracker):
    """Sends the configuration, metrics and samples as calls of one thread, which a resumed run goes on with.

    Calls are `hybridflow.start`, `hybridflow.step`, `hybridflow.sample` and `hybridflow.end`. Raises
    ConfigError where weave is missing.
    """

    def __init__(self, run: RunInfo) -> None:
        self._weave = import_extra("weave", "weave")
        os.environ.setdefault("WEAVE_PRINT_CALL_LINK", "false")  # its threads do not see the setting
        self._client = self._weave.init(run.project, settings={"implicitly_patch_integrations": False})
        self._experiment = run.experiment
        id_file = run.run_dir / "weave_thread_id.txt"
        self._thread_id = remembered_id(id_file, run.resume_step is not None) or uuid.uuid4().hex
        id_file.write_text(self._thread_id, encoding="utf-8")
        self._call("start", {"config": dict(run.config), "resume_step": run.resume_step}, None)
        # a kill may have come before the step of the checkpoint was sent; of one sent twice the later counts
        if run.resume_step is not None and run.resume_step in run.earlier:
            self.log(run.earlier[run.resume_step], run.resume_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("step", {"step": step}, dict(metrics))

    def log_samples(self, rows: Sequence[SampleRow], step: int) -> None:
        for row in rows:
            answer = {name: value for name, value in row.items() if name != "prompt"}
            self._call("sample", {"step": step, "prompt": row.get("prompt")}, answer)

    def close(self, outcome: Outcome = "finished") -> None:
        self._call("end", {}, {"outcome": outcome})
        self._weave.finish()

    def _call(self, name: str, inputs: dict[str, Any], output: dict[str, Any] | None) -> None:
        with self._weave.thread(self._thread_id):
            call = self._client.create_call(
                f"hybridflow.{name}",
                inputs,
                attributes={"experiment": self._experiment},
                display_name=f"{self._experiment} {name}",
                use_stack=False,
            )
            self._client.finish_call(call, output=output)
