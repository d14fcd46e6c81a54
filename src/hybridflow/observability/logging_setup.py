"""Logging of a command: one handler, our own lines at the chosen level, others from warnings on.

logging.getLogger(anything) ──► rich handler (terminal, does not break a live progress bar) or plain lines on
stderr (pipes, CI)
"""

from __future__ import annotations

import logging
import os
import sys

from rich.console import Console
from rich.logging import RichHandler

from hybridflow.errors import ConfigError

_HANDLER_NAME = "hybridflow"
_NOISY = (
    "transformers",
    "huggingface_hub",
    "httpx",
    "urllib3",
    "filelock",
    "fsspec",
    "datasets",
    "torch.distributed",
    "matplotlib",
)

FILE_WIDTH = 120
"""Columns of output that is no terminal; at rich's own 80 the names of metrics would break in the middle."""

WIDE_ENOUGH_FOR_COLUMNS = 50
"""Columns of a terminal from which a log line has room for its time and level."""

console = Console()
"""The console of a run; log lines, step lines and the status line share it, so that none overwrites another.
"""
if not console.is_terminal:
    console.width = max(console.width, FILE_WIDTH)


def setup_logging(level: str = "INFO", *, rich: bool | None = None) -> None:
    """Send log lines to the terminal (`rich=None`: if stdout is one), in place of the earlier setup.

    Raises ConfigError for a level that `logging` does not know.
    """
    numeric = logging.getLevelNamesMapping().get(str(level).upper())
    if numeric is None:
        raise ConfigError(f"log level {level!r} is unknown: use DEBUG, INFO, WARNING or ERROR")
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    if console.is_terminal if rich is None else rich:
        handler = _rich_handler()
    else:
        form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        handler.setFormatter(logging.Formatter(form, datefmt="%H:%M:%S"))
    handler.name = _HANDLER_NAME
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.name == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("hybridflow").setLevel(numeric)
    logging.captureWarnings(True)
    quieten_third_parties()


def quieten_third_parties() -> None:
    """Silence verbose libraries but for errors; their own environment variables win where they are set."""
    # transformers and huggingface_hub give their loggers a handler and a level when they are first imported,
    # so the variables must stand before that
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # in a log file a bar is a thousand lines; on a terminal a long download must show that it moves
    if not console.is_terminal:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _rich_handler() -> logging.Handler:
    columns_fit = console.width >= WIDE_ENOUGH_FOR_COLUMNS
    return RichHandler(
        console=console,
        show_path=False,
        show_time=columns_fit,
        show_level=columns_fit,
        log_time_format="%H:%M:%S",
    )
