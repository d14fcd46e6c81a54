"""The filter of system calls, for both machines: what a small reader of its instructions lets through."""

from __future__ import annotations

import errno
import operator
import struct

import pytest

from hybridflow.sandbox import seccomp

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOWED = 0x7FFF0000
KILLED = 0x80000000
REFUSED = 0x00050000 | errno.EPERM


def decide(
    machine: str,
    number: int,
    argument: int = 0,
    architecture: int | None = None,
    *,
    local_sockets: bool = True,
) -> int:
    """Run the filter on a system call as the kernel does, and return what becomes of the call."""
    fields = {0: number, 4: architecture or ARCHITECTURES[machine], 16: argument}
    lines = list(struct.iter_unpack("=HBBI", seccomp.filter_of(machine, local_sockets=local_sockets)))
    tests = {0x15: operator.eq, 0x35: operator.ge, 0x45: operator.and_}
    at = 0
    value = 0
    while True:
        code, if_true, if_false, operand = lines[at]
        at += 1
        if code == 0x20:
            value = fields[operand]
        elif code == 0x06:
            return int(operand)
        elif tests[code](value, operand):
            at += if_true
        else:
            at += if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_is_refused_and_what_passes(machine: str) -> None:
    column = list(ARCHITECTURES).index(machine)
    denied = {numbers[column] for numbers in seccomp.DENIED.values()}
    clone = (56, 220)[column]
    network = (41, 198)[column]
    for number in range(600):
        if number in denied:
            assert decide(machine, number) == REFUSED
        elif number == 435:
            assert decide(machine, number) == 0x00050000 | errno.ENOSYS
        elif number != network:
            assert decide(machine, number) == ALLOWED, number
    assert decide(machine, clone, 0x01200011) == ALLOWED  # as fork calls it
    assert decide(machine, clone, 0x003D0F00) == ALLOWED  # as a thread is made
    for flag in (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(machine, clone, flag | 17) == REFUSED
    assert decide(machine, network, 1) == ALLOWED
    for family in (0, 2, 10, 16, 17, 40):
        assert decide(machine, network, family) == REFUSED
    for number in range(600):
        alone = decide(machine, number, 1, local_sockets=False)
        assert alone == (REFUSED if number == network else decide(machine, number, 1))
    assert decide(machine, 0, architecture=0x40000003) == KILLED


def test_numbers_of_x32_end_the_process() -> None:
    assert decide("x86_64", 0x40000000) == KILLED
