"""What programs try in order to escape. One that succeeds prints ESCAPED.

In the codes stand SECRET (path of a file that holds "top-secret"), OUTSIDE (a folder that everybody may
write), PORT (of a TCP server on this machine), SOCKET (name of an abstract socket) and PARENT (pid of who
runs it). An attempt whose code has a mistake would end as `raised`, so most of them must end as `ok`.
"""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Attempt:
    """A program, the statuses that may come of it, and the layer without which it cannot be held."""

    code: str
    statuses: tuple[str, ...] = ("ok",)
    layer: str = "private_root"
    limits: dict[str, Any] = field(default_factory=dict)


START = """
import ctypes, errno, os, signal, socket, subprocess, sys, time, mmap
libc = ctypes.CDLL(None, use_errno=True)
def escaped(*what): print('ESCAPED', *what, flush=True)
def must_fail(what, function, *args):
    try:
        result = function(*args)
    except (OSError, ValueError, PermissionError) as error:
        print(what, 'failed:', error)
        return
    if isinstance(result, int) and result < 0:
        print(what, 'failed:', os.strerror(ctypes.get_errno()))
    else:
        escaped(what, result)
def must_not_read(path):
    try:
        with open(path, 'rb') as file: text = file.read(1000)
    except (OSError, ValueError) as error:
        print(path, error)
        return
    if text: escaped('read', path, text[:40])
import platform
X86 = platform.machine() == 'x86_64'
def call(x86, arm, *args):
    return libc.syscall(ctypes.c_long(x86 if X86 else arm), *args)
"""
STOPPED = ("process_exceeded", "raised", "memory_exceeded", "timed_out", "cpu_exceeded")

ATTEMPTS = {
    "fork_bomb": Attempt("while True: os.fork()", STOPPED, "namespaces"),
    "fork_bomb_that_hides_errors": Attempt(
        "while True:\n    try: os.fork()\n    except OSError: pass", STOPPED, "namespaces"
    ),
    "thread_bomb": Attempt(
        "import threading\nwhile True: threading.Thread(target=time.sleep, args=(600,)).start()", STOPPED
    ),
    "zombie_flood": Attempt(
        "for _ in range(10000):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(600)", STOPPED, "namespaces"
    ),
    "orphan_flood": Attempt(
        "while True:\n    if os.fork() == 0:\n        os.setsid()\n        os.fork() and os._exit(0)\n"
        "        time.sleep(600)",
        STOPPED,
        "namespaces",
    ),
    "memory_bomb": Attempt("x = []\nwhile True: x.append(b'1' * (8 << 20))", ("memory_exceeded",)),
    "memory_bomb_of_children": Attempt(
        "for _ in range(12):\n    if os.fork() == 0:\n        x = b'1' * (48 << 20)\n        time.sleep(600)\n"
        "time.sleep(600)",
        ("memory_exceeded",),
    ),
    "memory_bomb_in_a_mapping": Attempt(
        "m = mmap.mmap(-1, 1 << 30)\nfor i in range(0, 1 << 30, 4096): m[i] = 1", ("memory_exceeded",)
    ),
    "huge_reservation": Attempt("mmap.mmap(-1, 1 << 44)\nescaped('mapped')", ("raised",)),
    "deep_recursion": Attempt("sys.setrecursionlimit(10**9)\ndef f(): f()\nf()", (*STOPPED, "killed")),
    "endless_loop": Attempt("while True: pass", ("cpu_exceeded",), limits={"cpu_s": 0.5}),
    "loop_deaf_to_signals": Attempt(
        "for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True: pass",
        ("cpu_exceeded",),
        limits={"cpu_s": 0.5},
    ),
    "sleep": Attempt("time.sleep(600)", ("timed_out",), limits={"wall_s": 0.5}),
    "time_bomb_at_exit": Attempt(
        "import atexit\natexit.register(time.sleep, 600)", ("timed_out",), limits={"wall_s": 0.5}
    ),
    "time_bomb_in_a_thread": Attempt(
        "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()",
        ("timed_out",),
        limits={"wall_s": 0.5},
    ),
    "time_bomb_left_behind": Attempt(
        "if os.fork() == 0:\n    os.setsid()\n    time.sleep(600)",  # see the processes that are left
        ("ok",),
        layer="namespaces",
    ),
    "huge_output": Attempt("while True: print('x' * 100000)", ("output_exceeded",)),
    "huge_output_of_errors": Attempt("while True: sys.stderr.write('x' * 100000)", ("output_exceeded",)),
    "full_disk": Attempt(
        "with open('big', 'wb') as f:\n    for _ in range(1000): f.write(bytes(1 << 20))\nescaped('1 GB')",
        ("raised", "memory_exceeded"),
    ),
    "flood_of_files": Attempt(
        "for n in range(100000): open(f'f{n}', 'w').close()\nescaped('files')",
        ("raised",),
        limits={"cpu_s": 30},
    ),
    "reading_the_home": Attempt(
        "must_not_read('SECRET')\nmust_not_read(os.path.expanduser('~root/.bashrc'))"
    ),
    "reading_system_files": Attempt(
        "for p in ('/etc/shadow', '/etc/passwd', '/etc/hostname', '/var/log/syslog', '/boot/grub/grub.cfg'):\n"
        "    must_not_read(p)"
    ),
    "reading_the_environment": Attempt(
        "for key in os.environ:\n    if 'TOP' in key: escaped(key)\n"
        "for pid in (1, 2, 'self', 'thread-self', os.getppid(), PARENT):\n"
        "    must_not_read(f'/proc/{pid}/environ')"
    ),
    "proc": Attempt(
        "for pid in ('1', 'self'):\n"
        "    must_not_read(os.path.join('/proc', pid, 'root', 'etc', 'shadow'))\n"
        "for name in ('PARENT/mem', '1/cmdline', 'kcore', 'keys',\n"
        "             'sysrq-trigger', 'sys/kernel/core_pattern', 'PARENT/fd/0', 'self/mountinfo'):\n"
        "    must_not_read('/proc/' + name)\n"
        "must_fail('sysrq', open, '/proc/sysrq-trigger', 'w')\n"
        "must_fail('core_pattern', open, '/proc/sys/kernel/core_pattern', 'w')"
    ),
    "sys_and_cgroups": Attempt(
        "must_not_read('/sys/fs/cgroup/cgroup.procs')\nmust_not_read('/sys/kernel/uevent_helper')\n"
        "must_fail('cgroup', open, '/sys/fs/cgroup/cgroup.procs', 'w')"
    ),
    "symlinks": Attempt(
        "for n, target in enumerate(('SECRET', '/etc/shadow', '../../../../../../SECRET', '/proc/self/root')):\n"
        "    os.symlink(target, f'link{n}')\n    must_not_read(f'link{n}')\n"
        "os.symlink('OUTSIDE', 'folder')\nmust_fail('write', open, 'folder/x', 'w')"
    ),
    "hard_links": Attempt("must_fail('link', os.link, 'SECRET', 'linked')"),
    "unicode_paths": Attempt(
        "p = 'SECRET'\n"
        "for path in ('/scratch/..' + p, '/scratch/../../../..' + p, p.replace('/', '\\u2215'),\n"
        "             p.replace('/', '\\uff0f'), '\\u2025' + p, '/\\u202e' + p[::-1], './\\u200b/../..' + p,\n"
        "             p + '\\x00.txt', '//' + p, '/dev/shm/..' + p, '/tmp/../..' + p, os.fsdecode(b'\\xff/..') + p):\n"
        "    must_not_read(path)\nopen('\\u202etxt.\\U0001f600', 'w').close()"
    ),
    "writing_outside": Attempt(
        "for p in ('OUTSIDE/x', '/x', '/usr/x', '/lib/x', '/dev/x', '/proc/x', sys.prefix + '/x', '/etc/x',\n"
        "          os.__file__, sys.executable, json_file):\n    must_fail(p, open, p, 'a')\n"
        "must_fail('mkdir', os.mkdir, '/y')\nmust_fail('remove', os.remove, os.__file__)\n"
        "must_fail('chmod', os.chmod, os.__file__, 0o777)"
    ),
    "network_tcp": Attempt(
        "for host in ('127.0.0.1', '8.8.8.8', '169.254.169.254'):\n"
        "    def go():\n        s = socket.socket()\n        s.settimeout(3)\n        s.connect((host, PORT))\n"
        "    must_fail(host, go)",
        layer="namespaces",
    ),
    "network_udp_and_names": Attempt(
        "def go():\n    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n    s.sendto(b'x', ('8.8.8.8', 53))\n"
        "must_fail('udp', go)\nmust_fail('name', socket.getaddrinfo, 'example.org', 80)",
        layer="namespaces",
    ),
    "network_raw_and_kernel_sockets": Attempt(
        "for family in (2, 10, 16, 17, 40, 38, 15):\n    must_fail(family, socket.socket, family, socket.SOCK_RAW)",
        layer="seccomp",
    ),
    "abstract_socket": Attempt(
        "def go():\n    s = socket.socket(socket.AF_UNIX)\n    s.connect('\\0SOCKET')\nmust_fail('abstract', go)",
        layer="namespaces",
    ),
    "signals_to_the_parent": Attempt(
        "must_fail('parent', os.kill, PARENT, 9)\n"
        "for pid in (1, os.getppid()):\n"
        "    for number in (9, 15, 19, 11):\n"
        "        try: os.kill(pid, number)\n"
        "        except OSError: pass\n"
        "try: os.kill(-1, 9)\nexcept OSError: pass",
        layer="namespaces",
    ),
    "ptrace": Attempt(
        "must_fail('attach', call, 101, 117, 16, os.getppid(), 0, 0)\n"
        "must_fail('seize', call, 101, 117, 0x4206, os.getppid(), 0, 0)\nmust_fail('traceme', call, 101, 117, 0, 0, 0, 0)",
        layer="seccomp",
    ),
    "memory_of_other_processes": Attempt(
        "b = ctypes.create_string_buffer(64)\nv = (ctypes.c_size_t * 2)(ctypes.addressof(b), 64)\n"
        "must_fail('readv', call, 310, 270, os.getppid(), v, 1, v, 1, 0)\n"
        "must_fail('pidfd_getfd', call, 438, 438, 0, 0, 0)",
        layer="seccomp",
    ),
    "mounting": Attempt(
        "os.mkdir('m')\nmust_fail('tmpfs', libc.mount, b'x', b'm', b'tmpfs', 0, None)\n"
        "must_fail('proc', libc.mount, b'x', b'm', b'proc', 0, None)\n"
        "must_fail('bind', libc.mount, b'/', b'm', None, 4096, None)\n"
        "must_fail('remount', libc.mount, None, b'/', None, 32 | 4096, None)\n"
        "must_fail('umount', libc.umount2, b'/proc', 2)\nmust_fail('open_tree', call, 428, 428, -100, b'/', 1)\n"
        "must_fail('fsopen', call, 430, 430, b'tmpfs', 0)\nmust_fail('pivot', call, 155, 41, b'.', b'.')\n"
        "must_fail('chroot', os.chroot, '.')",
        layer="seccomp",
    ),
    "new_user_namespace": Attempt(
        "must_fail('unshare', libc.unshare, 0x10000000)\nmust_fail('unshare mounts', libc.unshare, 0x20000)\n"
        "must_fail('clone', call, 56, 220, 0x10000000 | 17, 0, 0, 0, 0)\n"
        "must_fail('clone3', call, 435, 435, bytes(88), 88)\nmust_fail('setns', libc.setns, 0, 0)",
        layer="seccomp",
    ),
    "setuid": Attempt(
        "must_fail('setuid', os.setuid, 0)\nmust_fail('setgid', os.setgid, 0)\nmust_fail('setgroups', os.setgroups, [0])\n"
        "if 0 in os.getresuid() + os.getresgid() or os.getgroups(): escaped('ids', os.getresuid(), os.getgroups())\n"
        "import shutil\nshutil.copy(sys.executable, 'suid')\nos.chmod('suid', 0o6755)\n"
        "for path in ('./suid', '/usr/bin/su', '/bin/mount', '/usr/bin/sudo'):\n"
        "    try: out = subprocess.run([path, '-c', 'import os; print(os.geteuid())'], capture_output=True)\n"
        "    except OSError: continue\n    if out.stdout.strip() == b'0': escaped(path)",
    ),
    "capabilities": Attempt(
        "must_fail('reboot', call, 169, 142, 0xfee1dead, 672274793, 0, None)\n"
        "must_fail('host name', socket.sethostname, 'x')\nmust_fail('clock', time.clock_settime, 0, 0)\n"
        "must_fail('nice', os.setpriority, 0, 0, -5)\nmust_fail('bpf', call, 321, 280, 0, bytes(72), 72)\n"
        "must_fail('keyctl', call, 250, 219, 0, -3, 0)\nmust_fail('perf', call, 298, 241, bytes(120), 0, -1, -1, 0)\n"
        "must_fail('userfaultfd', call, 323, 282, 1)\nmust_fail('module', call, 313, 273, 0, b'', 0)\n"
        "must_fail('handle', call, 304, 265, 0, bytes(16), 0)\nmust_fail('syslog', call, 103, 116, 3, None, 0)",
        layer="seccomp",
    ),
    "io_uring": Attempt(
        "must_fail('setup', call, 425, 425, 8, ctypes.create_string_buffer(120))\n"
        "must_fail('enter', call, 426, 426, 0, 1, 0, 0, None)\nmust_fail('register', call, 427, 427, 0, 0, None, 0)",
        layer="seccomp",
    ),
    "calls_of_32_bits": Attempt(
        "if not X86: sys.exit(1)\nm = mmap.mmap(-1, 4096, prot=7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))\n"  # mov eax, 20 (getpid); int 0x80; ret
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\nescaped(f())",
        ("killed", "raised"),
        layer="seccomp",
    ),
    "calls_of_x32": Attempt(
        "if not X86: sys.exit(1)\nmust_fail('x32', libc.syscall, ctypes.c_long(0x40000000 + 39))",
        ("killed", "raised"),
        layer="seccomp",
    ),
    "device_files": Attempt(
        "import stat\nmust_fail('mknod', os.mknod, 'disk', 0o600 | stat.S_IFBLK, os.makedev(8, 0))\n"
        "must_fail('mem', os.mknod, 'mem', 0o600 | stat.S_IFCHR, os.makedev(1, 1))\n"
        "for name in ('mem', 'kmsg', 'sda', 'vda', 'nvme0n1', 'kvm', 'fuse', 'tty', 'nvidia0', 'port', 'ptmx'):\n"
        "    must_fail(name, os.open, '/dev/' + name, os.O_RDWR)"
    ),
    "open_file_descriptors": Attempt(
        "for n in range(3, 4096):\n    try: os.fstat(n)\n    except OSError: continue\n    escaped('open', n)"
    ),
    "another_interpreter": Attempt(
        "out = subprocess.run([sys.executable, '-c', \"open('SECRET')\"], capture_output=True, text=True)\n"
        "print(out)\nif out.returncode == 0: escaped('exec')\n"
        "out = subprocess.run([sys.executable, '-c', \"import os; os.unshare if 0 else os.setuid(0)\"])\n"
        "if out.returncode == 0: escaped('exec')"
    ),
    "program_in_memory": Attempt(
        "fd = os.memfd_create('x')\nos.write(fd, open(sys.executable, 'rb').read())\n"
        "os.execve(fd, ['x', '-c', \"print(open('SECRET').read()); print('ESCAPED')\"], {})",
        ("raised",),
    ),
    "higher_limits": Attempt(
        "import resource as r\n"
        "for kind in (r.RLIMIT_AS, r.RLIMIT_CPU, r.RLIMIT_NPROC, r.RLIMIT_FSIZE, r.RLIMIT_NOFILE):\n"
        "    soft, hard = r.getrlimit(kind)\n    if hard < 0: escaped('no limit', kind)\n"
        "    must_fail(kind, r.setrlimit, kind, (hard + 1, hard + 1))"
    ),
    "made_up_verdict": Attempt(
        "import json, struct\nv = json.dumps({'status': 'ok', 'exit_code': 0}).encode()\n"
        "for n in range(1, 100):\n    try: os.write(n, struct.pack('!I', len(v)) + v)\n    except OSError: pass\n"
        "os._exit(9)",
        ("raised",),
    ),
    "terminal": Attempt(
        "import fcntl, termios\nfor n in (0, 1, 2): must_fail('tiocsti', fcntl.ioctl, n, termios.TIOCSTI, b'x')\n"
        "must_fail('tty', open, '/dev/tty', 'w')"
    ),
    "queues_that_outlive": Attempt(
        "must_fail('shm', call, 29, 194, 1, 4096, 0o1666)\nmust_fail('msg', call, 68, 186, 1, 0o1666)\n"
        "must_fail('sem', call, 64, 190, 1, 1, 0o1666)\nmust_fail('mq', call, 240, 180, b'x', 0o102, 0o666, None)",
        layer="seccomp",
    ),
    "code_with_a_zero_byte": Attempt("x = 1\0", ("raised",)),
    "output_that_is_no_text": Attempt("os.write(1, b'\\xff\\xfe\\x00')\nprint('\\udc80')", ("ok", "raised")),
}
