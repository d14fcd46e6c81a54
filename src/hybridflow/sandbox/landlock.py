"""Landlock: this process may read some paths and write others, by rules that it cannot take back."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable

from hybridflow.sandbox.system_calls import PR_SET_NO_NEW_PRIVS, prctl, system_call

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_ASK_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_TRUNCATE = 1 << 14
_IOCTL_DEVICE = 1 << 15
_RIGHTS_OF_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of rights on files that a version of Landlock knows; later ones know those of 5."""
_TCP = 0b11
"""To bind and to connect, from version 4."""
_SCOPES = 0b11
"""Abstract sockets of others, and signals to others, from version 6."""
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE


def version() -> int:
    """Return the version of Landlock that the kernel has. Raises OSError if it has none."""
    return system_call("landlock_create_ruleset", _CREATE_RULESET, None, 0, _ASK_VERSION)


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Allow this process, and all that it starts, to read and execute beneath some paths and to do
    everything but making devices beneath others; nothing else, no TCP, and no signals to processes outside.
    Paths that do not exist are left out. Raises OSError.
    """
    known = version()
    every_right = (1 << _RIGHTS_OF_VERSION.get(known, 16)) - 1
    words = [every_right]
    if known >= 4:
        words.append(_TCP)
    if known >= 6:
        words.append(_SCOPES)
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = system_call(
        "landlock_create_ruleset", _CREATE_RULESET, ctypes.c_char_p(attributes), len(attributes), 0
    )
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
    for path in writable:
        _allow(ruleset, path, every_right)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    system_call("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        file_descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(os.fstat(file_descriptor).st_mode):
        rights &= _OF_FILES
    rule = struct.pack("=Qi", rights, file_descriptor)
    system_call("landlock_add_rule", _ADD_RULE, ruleset, _RULE_PATH_BENEATH, ctypes.c_char_p(rule), 0)
    os.close(file_descriptor)
