"""System calls of Linux that Python 3.11 has no function for. Each may raise OSError."""

from __future__ import annotations

import ctypes
import os
import platform

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
CLONE_NEWTIME = 0x00000080

MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
MOUNT_ATTR_RDONLY = 1
MOUNT_ATTR_NOSUID = 2
AT_FDCWD = -100
AT_RECURSIVE = 0x8000

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

MACHINE = platform.machine()
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(what: str, number: int, *arguments: object) -> int:
    """Make a system call by its number; integers go as 64 bits, and everything else as a pointer."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *words), what)


def unshare(flags: int) -> None:
    """Give this process, or for CLONE_NEWPID its next child, its own namespaces."""
    _checked(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Mount a file system, or bind a path."""
    words = [each.encode() if each is not None else None for each in (source, target, kind, options)]
    _checked(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def make_read_only(path: str, flags: int) -> None:
    """Make a mount read-only and its set-uid bits void, with AT_RECURSIVE also all mounts below it."""
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    system_call(
        f"mount_setattr {path}",
        _MOUNT_SETATTR,
        AT_FDCWD,
        path.encode(),
        flags,
        ctypes.byref(attributes),
        ctypes.sizeof(attributes),
    )


def pivot_root(folder: str) -> None:
    """Make a mount the root of this process, and forget the old root."""
    os.chdir(folder)
    system_call("pivot_root", _PIVOT_ROOT[MACHINE], b".", b".")
    _checked(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "umount of the old root")
    os.chdir("/")


def prctl(option: int, value: int, pointer: object = None) -> None:
    """Set an attribute of this process."""
    _checked(_libc.prctl(option, ctypes.c_ulong(value), pointer, None, None), f"prctl {option}")


def set_capabilities(capabilities: int) -> None:
    """Set the effective and permitted capabilities to a bit mask, and the inheritable ones to none."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    low = capabilities & 0xFFFFFFFF
    high = capabilities >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    _checked(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")
