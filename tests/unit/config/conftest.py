"""A run that is possible, for the tests to spoil."""

from __future__ import annotations

from pathlib import Path

import pytest
from possible_run import write_model_folder


@pytest.fixture
def base(tmp_path: Path) -> list[str]:
    """Overrides with which a run is possible: existing files, a model folder, a run folder."""
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(b"")
    write_model_folder(tmp_path / "model")
    return [
        f"data.train_files={tmp_path}/train.parquet",
        f"data.val_files={tmp_path}/test.parquet",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
