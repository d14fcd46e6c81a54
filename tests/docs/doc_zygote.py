"""A process that has imported everything once and forks for each command, because imports cost most.

    program on PATH ──words, folder, environment, its stdin, stdout, stderr──► Zygote ──fork──► doc_shim.main
                    ◄──────────────── pid, then exit status ────────────────

`python doc_zygote.py serve SOCKET` is the zygote; `python doc_zygote.py SOCKET PROGRAM WORD…` is a command.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path


def serve(address: str) -> None:
    """Import what commands need, then fork for each connection."""
    import doc_shim
    import torch
    import transformers.generation

    import hybridflow.merger
    import hybridflow.trainer.evaluation.main
    import hybridflow.trainer.ppo.build
    import hybridflow.trainer.sft.build

    assert all((torch, transformers, doc_shim, hybridflow)), "imported for the processes to come"
    server = socket.socket(socket.AF_UNIX)
    server.bind(address + ".new")
    server.listen(16)
    os.rename(address + ".new", address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            _watch(connection)
        connection.close()


def _watch(connection: socket.socket) -> None:
    """Fork the process of a command and tell how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stream = connection.makefile("rb")
    _, handles, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(stream.readline())
    child = os.fork()
    if child == 0:
        connection.close()
        _run(request, handles)
    for handle in handles:
        os.close(handle)
    connection.sendall(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _run(request: dict[str, object], handles: list[int]) -> None:
    """Become the command: its folder, environment and streams, then its words."""
    import doc_shim

    code = 1
    try:
        os.setpgid(0, 0)
        for number, handle in enumerate(handles):
            os.dup2(handle, number)
        os.chdir(str(request["folder"]))
        os.environ.clear()
        os.environ.update(request["environment"])  # type: ignore[call-overload]
        sys.path.insert(0, "")
        code = doc_shim.main(list(request["words"]))  # type: ignore[call-overload]
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            sys.stderr.write(f"{ended.code}\n")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def command(address: str, words: list[str]) -> int:
    """Have the zygote run a command with this process's streams, and return its exit status."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    socket.send_fds(connection, [b"."], [0, 1, 2])
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    connection.sendall(json.dumps(request).encode() + b"\n")
    stream = connection.makefile("rb")
    child = int(stream.readline())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda given, _: os.kill(child, given))
    return abs(int(stream.readline() or b"1"))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.path.insert(0, str(Path(__file__).parent))
        serve(sys.argv[2])
    sys.exit(command(sys.argv[1], sys.argv[2:]))
