"""A filter of system calls (seccomp-bpf): those that no program of a model needs fail with EPERM.

The kernel's attack surface shrinks (io_uring, bpf, user namespaces, keyrings, perf), other processes cannot
be traced, nothing can be mounted, and only local sockets can be made, or none but pairs. Calls of another
machine's numbering (32 bits, x32) end the process.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from hybridflow.sandbox.system_calls import (
    CLONE_NEWCGROUP,
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWTIME,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MACHINE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_SECCOMP,
    prctl,
)

# name: (number on x86_64, number on aarch64)
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    # what System V and POSIX message queues hold would outlive the program
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
_CLONE = (56, 220)
_CLONE3 = 435
_SOCKET = (41, 198)
_COLUMN = {"x86_64": 0, "aarch64": 1}
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000
_AF_UNIX = 1
_NEW_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
) | CLONE_NEWTIME

_LOAD = 0x20
_JUMP_EQUAL = 0x15
_JUMP_AT_LEAST = 0x35
_JUMP_ANY_BIT = 0x45
_RETURN = 0x06
_KILL = 0x80000000
_ERROR = 0x00050000
_ALLOW = 0x7FFF0000
# offsets in struct seccomp_data
_NUMBER = 0
_ARCH = 4
_FIRST_ARGUMENT = 16
_MODE_FILTER = 2


def filter_of(machine: str, *, local_sockets: bool = True) -> bytes:
    """Return the filter as instructions of classic BPF, eight bytes each.

    Without `local_sockets`, which reach others where there is no network namespace, only pairs of sockets can
    be made. Raises KeyError for a machine whose numbers are not known.
    """
    column = _COLUMN[machine]
    lines: list[tuple[int, int, int, int]] = []  # code, lines to skip if true, if false, operand

    def refuse(jump: int, operand: int, action: int) -> None:
        lines.append((jump, 0, 1, operand))
        lines.append((_RETURN, 0, 0, action))

    lines.append((_LOAD, 0, 0, _ARCH))
    lines.append((_JUMP_EQUAL, 1, 0, _ARCHITECTURE[machine]))
    lines.append((_RETURN, 0, 0, _KILL))
    lines.append((_LOAD, 0, 0, _NUMBER))
    if machine == "x86_64":
        refuse(_JUMP_AT_LEAST, _X32, _KILL)
    for numbers in DENIED.values():
        refuse(_JUMP_EQUAL, numbers[column], _ERROR | errno.EPERM)
    # its flags are behind a pointer, which a filter cannot read; libc falls back to clone
    refuse(_JUMP_EQUAL, _CLONE3, _ERROR | errno.ENOSYS)
    lines.append((_JUMP_EQUAL, 0, 4, _CLONE[column]))
    lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT))
    refuse(_JUMP_ANY_BIT, _NEW_NAMESPACES, _ERROR | errno.EPERM)
    lines.append((_RETURN, 0, 0, _ALLOW))
    if local_sockets:
        lines.append((_JUMP_EQUAL, 0, 3, _SOCKET[column]))
        lines.append((_LOAD, 0, 0, _FIRST_ARGUMENT))
        lines.append((_JUMP_EQUAL, 1, 0, _AF_UNIX))
        lines.append((_RETURN, 0, 0, _ERROR | errno.EPERM))
    else:
        refuse(_JUMP_EQUAL, _SOCKET[column], _ERROR | errno.EPERM)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def install(*, local_sockets: bool = True) -> None:
    """Put this process, and all that it starts, under the filter. Raises OSError, or KeyError on a machine
    whose numbers are not known.
    """
    instructions = filter_of(MACHINE, local_sockets=local_sockets)
    buffer = ctypes.create_string_buffer(instructions)
    # struct sock_fprog: number of instructions, padding, pointer
    header = struct.pack("=HxxxxxxQ", len(instructions) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, _MODE_FILTER, header)
