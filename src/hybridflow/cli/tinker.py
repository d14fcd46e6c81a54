"""`hybridflow tinker`: the options of the command, and how they become a running server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from hybridflow.cli.serve import check_server

KEY_VARIABLE = "HYBRIDFLOW_TINKER_KEY"
KEY_PREFIX = "tml-"
"""How a key begins that Tinker's client sends."""


def add_tinker(words: Any) -> None:
    """Add the grammar of the command."""
    tinker = words.add_parser("tinker", help="serve LoRA training and sampling to the client of Tinker")
    tinker.add_argument("model", help="a Hugging Face folder or hub name: the base that all runs share")
    tinker.add_argument(
        "--folder",
        default="tinker",
        help="sessions and checkpoints, found again at the next start (default: %(default)s)",
    )
    tinker.add_argument("--host", default="127.0.0.1", help="default: this machine only")
    tinker.add_argument("--port", type=int, default=8010, help="default: %(default)s; 0: any free one")
    tinker.add_argument(
        "--api-key-file",
        type=Path,
        help=f"file with the clients' key, {KEY_PREFIX}… (default: {KEY_VARIABLE}, else a new one)",
    )
    tinker.add_argument(
        "--name", help="base_model in requests (default: the folder's absolute path, or the hub name)"
    )
    tinker.add_argument("--device", default="auto", help="cpu or cuda (default: cuda where there is one)")
    tinker.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16")
    tinker.add_argument(
        "--max-runs", type=int, default=16, help="training runs in memory (default: %(default)s)"
    )
    tinker.add_argument(
        "--max-num-seqs", type=int, default=256, help="responses decoded together (default: %(default)s)"
    )
    tinker.add_argument(
        "--max-tokens-per-pass",
        type=int,
        default=8192,
        help="tokens of a training pass (default: %(default)s)",
    )
    tinker.set_defaults(body=run)


def run(options: argparse.Namespace) -> int:
    """Run the cheap checks, load the model, and serve until a signal comes."""
    check_server(
        "tinker",
        max_runs=options.max_runs,
        max_num_seqs=options.max_num_seqs,
        max_tokens_per_pass=options.max_tokens_per_pass,
    )
    given = _given_key(options.api_key_file)
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown(), progress.importing():
        from hybridflow.rollout.server.run import choose_token, listen
        from hybridflow.tinker.run import TinkerSettings, build, serve

    key, is_new = choose_token(options.host, given, variable=KEY_VARIABLE)
    bound = listen(options.host, options.port)
    folder = Path(options.model).expanduser()
    path = str(folder.resolve()) if folder.is_dir() else options.model
    try:
        with progress.shown(), progress.phase("loading the model"):
            service = build(
                TinkerSettings(
                    model=path,
                    name=options.name or path,
                    folder=Path(options.folder).expanduser(),
                    device=options.device,
                    dtype=options.dtype,
                    max_runs=options.max_runs,
                    max_rows=options.max_num_seqs,
                    pass_tokens=options.max_tokens_per_pass,
                )
            )
        key = f"{KEY_PREFIX}{key}" if is_new else key
        host, port = bound.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        print(f"serving {service.name} at http://{shown}:{port}", flush=True)
        if is_new:
            print(f"key of this run (TINKER_API_KEY of clients): {key}", flush=True)
        serve(service, bound, key)
    finally:
        bound.close()
    return 0


def _given_key(file: Path | None) -> str | None:
    """Return the key of a file, or of the environment; ConfigError for one that the client would not send."""
    from hybridflow.errors import ConfigError

    key = os.environ.get(KEY_VARIABLE)
    if file is not None:
        try:
            key = file.expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from error
    if key is not None and not key.startswith(KEY_PREFIX):
        raise ConfigError(
            f"the key does not begin with {KEY_PREFIX!r}, and Tinker's client sends no other: change "
            f"--api-key-file or {KEY_VARIABLE}"
        )
    return key
