"""`hybridflow serve`: the options of the command, and how they become a running server."""

from __future__ import annotations

import argparse
import importlib.util
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hybridflow.cli.evaluate import merged

TOKEN_VARIABLE = "HYBRIDFLOW_SERVE_TOKEN"


def add_serve(words: Any) -> None:
    """Add the grammar of the command."""
    serve = words.add_parser("serve", help="serve a model over HTTP, for clients of OpenAI's interface")
    serve.add_argument("model", help="a Hugging Face folder or hub name, or a checkpoint (global_step_N)")
    serve.add_argument(
        "--host", default="127.0.0.1", help="default: this machine only; any other needs a token of yours"
    )
    serve.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free one")
    serve.add_argument(
        "--api-key",
        help=f"the token that clients send; better set {TOKEN_VARIABLE}, which no list of processes shows",
    )
    serve.add_argument("--no-token", action="store_true", help="let every program on this machine in")
    serve.add_argument(
        "--served-model-name", help="the name that requests call the model by (default: the folder's name)"
    )
    _add_engine(serve)
    _add_limits(serve)
    serve.add_argument(
        "--trust-remote-code", action="store_true", help="run the model code that the folder brings along"
    )
    serve.set_defaults(body=run)


def _add_engine(serve: argparse.ArgumentParser) -> None:
    """Add the options of the generation engine."""
    serve.add_argument(
        "--device",
        help=(
            "cpu, cuda, or several with commas (cuda:0,cuda:1): an engine on each (default: cuda where "
            "there is one)"
        ),
    )
    serve.add_argument("--dtype", default="auto", help="auto (default), float32, bfloat16")
    serve.add_argument(
        "--quantization",
        choices=("int8", "fp8", "float16"),
        help="round the weights: int8 anywhere, fp8 on GPUs that multiply it, float16 on a CPU (default: no)",
    )
    serve.add_argument(
        "--max-model-len",
        type=int,
        help="tokens of prompt and response together (default: the model's positions)",
    )
    serve.add_argument(
        "--max-num-seqs",
        type=int,
        default=256,
        help="responses decoded together by an engine (default: %(default)s)",
    )
    serve.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="prompt tokens of one pass, between which others go on (default: 8192, on a CPU 256)",
    )
    serve.add_argument(
        "--gpu-memory-utilization",
        type=float,
        help="share of the free memory for keys and values (default: 0.8, on a CPU 0.25)",
    )
    serve.add_argument(
        "--speculate",
        action="store_true",
        help="draft tokens from a prompt and its answers, and verify them: faster where texts repeat",
    )
    serve.add_argument("--no-prefix-caching", action="store_true", help="keep nothing of earlier responses")
    serve.add_argument(
        "--tool-call-parser",
        help="how the model writes calls, for example hermes (default: by its chat template)",
    )
    serve.add_argument("--chat-template", type=Path, help="a jinja file in place of the tokenizer's template")


def _add_limits(serve: argparse.ArgumentParser) -> None:
    """Add the options that keep requests from taking too much."""
    serve.add_argument(
        "--max-queue",
        type=int,
        default=4096,
        help="responses in work or waiting; more get 429 (default: %(default)s)",
    )
    serve.add_argument(
        "--max-body-mb", type=float, default=16.0, help="a larger body gets 413 (default: %(default)s)"
    )
    serve.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        help="seconds until a request gets 504; 0: none (default: %(default)s)",
    )
    serve.add_argument(
        "--shutdown-timeout",
        type=int,
        default=30,
        help="seconds that running requests have at the end (default: %(default)s)",
    )

    serve.add_argument(
        "--fetch-media",
        action="store_true",
        help="fetch pictures that requests name by an http address; the server then asks whomever they name",
    )


def check_server(command: str, **counts: int | None) -> None:
    """Raise ConfigError where a library of servers is missing, and for an option that counts something and is
    below 1.
    """
    from hybridflow.errors import ConfigError, install_extra

    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"hybridflow {command} needs {' and '.join(missing)}, which is not installed: "
            f"{install_extra('serve')}"
        )
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: wanted at least 1")


def run(options: argparse.Namespace) -> int:
    """Run the cheap checks, load the model, and serve until a signal comes."""
    check_server(
        "serve",
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
    )
    from hybridflow.observability.logging_setup import setup_logging
    from hybridflow.observability.progress import progress

    setup_logging()
    with progress.shown(), progress.importing():
        from hybridflow.rollout.server.run import choose_token, listen

    given = options.api_key
    if given is None:
        given = os.environ.get(TOKEN_VARIABLE)
    token, is_new = choose_token(options.host, given, no_token=options.no_token)
    bound = listen(options.host, options.port)
    try:
        with ExitStack() as stack:
            return _serve(options, bound, token, is_new, stack)
    finally:
        bound.close()


def _serve(options: argparse.Namespace, bound: Any, token: str | None, is_new: bool, stack: ExitStack) -> int:
    from hybridflow.observability.progress import progress

    with progress.shown(), progress.phase("loading the model"):
        from hybridflow.rollout.server.build import build_service
        from hybridflow.rollout.server.run import run_server

        service = build_service(_settings(options, stack))
    host, port = bound.getsockname()[:2]
    shown = host
    if ":" in host:
        shown = f"[{host}]"  # IPv6
    print(f"serving {service.model.name} at http://{shown}:{port}/v1", flush=True)
    if is_new:
        print(f"token of this run (api_key of clients): {token}", flush=True)
    run_server(service, bound, token=token, grace_s=options.shutdown_timeout)
    return 0


def _settings(options: argparse.Namespace, stack: ExitStack) -> Any:
    from hybridflow.distributed.device import resolve_device
    from hybridflow.rollout.server.build import ServeSettings
    from hybridflow.rollout.server.service import ServerLimits

    device = options.device
    if not device:
        device = resolve_device("auto").type
    memory_share = 0.8
    pass_tokens = 8192
    if device.startswith("cpu"):
        memory_share = 0.25
        pass_tokens = 256  # of a model of 135 million parameters, a pass takes half a second to two seconds
    return ServeSettings(
        model=_model_folder(options, stack),
        name=options.served_model_name or Path(options.model).expanduser().name,
        devices=tuple(device.split(",")),
        dtype=options.dtype,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or pass_tokens,
        memory_share=options.gpu_memory_utilization or memory_share,
        prefix_caching=not options.no_prefix_caching,
        speculate=options.speculate,
        quantization=options.quantization,
        max_model_len=options.max_model_len,
        tool_parser=options.tool_call_parser,
        chat_template=options.chat_template,
        trust_remote_code=options.trust_remote_code,
        fetch_media=options.fetch_media,
        limits=ServerLimits(
            max_queue=options.max_queue,
            max_body_bytes=int(options.max_body_mb * 2**20),
            deadline_s=options.request_timeout or None,
        ),
    )


def _model_folder(options: argparse.Namespace, stack: ExitStack) -> str:
    """Return the model as it was named, or the Hugging Face folder made of a checkpoint."""
    from hybridflow.checkpoint.layout import ACTOR, STRUCTURE

    given = Path(options.model).expanduser()
    if not any((place / STRUCTURE).is_file() for place in (given, given / ACTOR)):
        return str(options.model)
    return merged(given, stack, options.trust_remote_code)
