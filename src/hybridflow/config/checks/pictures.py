"""The check of pictures in the data for a run that reads text alone."""

from __future__ import annotations

from collections.abc import Iterator

from hybridflow.config.checks.paths import first_row
from hybridflow.config.needs import reads_text_alone
from hybridflow.config.root import PPOConfig


def picture_problems(config: PPOConfig) -> Iterator[str]:
    """Yield one line where the first row of the data has pictures, and the run would read its text alone."""
    data = config.data
    reason = reads_text_alone(config)
    if reason is None or data.custom_cls.path:
        return
    if data.task.name == "red_squares":
        yield f"data.task.name=red_squares makes pictures, and {reason}"
    for key, files in (("data.train_files", data.train_files), ("data.val_files", data.val_files)):
        row = first_row(files)
        if any(row.get(column) for column in (data.image_key, data.video_key) if column):
            yield f"{key} has pictures, and {reason}"
