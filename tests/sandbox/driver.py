"""A process that stands for the trainer: runs programs in a sandbox, as root or as an ordinary user.

    python driver.py USER CGROUP      USER: root or an id; CGROUP: yes or no

Lines of JSON come in, {code, limits}; lines of JSON go out, first {layers} or {missing: why}, then verdicts.
Started as root it becomes the user; the interpreter's folders are bound to where that user can read them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from pathlib import Path

from hybridflow.config.reward import SandboxConfig
from hybridflow.errors import ConfigError
from hybridflow.sandbox import system_calls
from hybridflow.sandbox.cgroup import PREFIX, parents
from hybridflow.sandbox.sandbox import Sandbox

CONFIG = SandboxConfig(
    timeout=60,
    cpu_time=20,
    memory_limit_mb=256,
    address_space_mb=2048,
    max_processes=24,
    max_output_kb=256,
    scratch_mb=32,
)


def show_interpreter() -> None:
    """Let everybody read the interpreter and its packages, in a mount namespace of this process."""
    system_calls.unshare(system_calls.CLONE_NEWNS)
    system_calls.mount("none", "/", None, system_calls.MS_REC | system_calls.MS_PRIVATE)
    folders = {
        str(Path(each).resolve()) for each in (sys.prefix, sys.base_prefix, *sys.path) if Path(each).is_dir()
    }
    hidden: dict[str, list[str]] = {}
    for folder in folders:
        for parent in reversed(Path(folder).parents):
            if not parent.stat().st_mode & 0o001:
                hidden.setdefault(str(parent), []).append(folder)
                break
    for parent_name, inside in hidden.items():
        opened = {folder: os.open(folder, os.O_PATH) for folder in inside}
        system_calls.mount("tmpfs", parent_name, "tmpfs", 0, "mode=755")
        for folder, file_descriptor in sorted(opened.items()):
            if not Path(folder).exists():
                Path(folder).mkdir(parents=True)
                system_calls.mount(f"/proc/self/fd/{file_descriptor}", folder, None, system_calls.MS_BIND)
            os.close(file_descriptor)


def delegate_cgroups(user: int) -> None:
    """Move this process into groups that the user may divide, where the machine has version 1 of cgroups."""
    with contextlib.suppress(OSError):
        for folder, version in parents().values():
            own = folder / f"{PREFIX}-{os.getpid()}-of-a-user"
            if version == 1:
                own.mkdir()
                (own / "cgroup.procs").write_text(str(os.getpid()))
                for path in (own, own / "cgroup.procs"):
                    os.chown(path, user, user)


def main(user: str, cgroup: str) -> None:
    """Answer requests until standard input ends."""
    if user != "root" and os.geteuid() == 0:
        show_interpreter()
        if cgroup == "yes":
            delegate_cgroups(int(user))
        os.setgroups([])
        os.setresgid(int(user), int(user), int(user))
        os.setresuid(int(user), int(user), int(user))
        system_calls.prctl(system_calls.PR_SET_DUMPABLE, 1)
    sandbox = Sandbox(CONFIG, cgroup=cgroup == "yes")
    try:
        print(json.dumps({"layers": sandbox.layers()}), flush=True)
    except ConfigError as error:
        print(json.dumps({"missing": str(error)}), flush=True)
        return
    for line in sys.stdin:
        request = json.loads(line)
        limits = dataclasses.replace(sandbox.limits, **request["limits"])
        verdict = sandbox.run(request["code"], limits=limits)
        print(json.dumps(dataclasses.asdict(verdict)), flush=True)
    sandbox.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
