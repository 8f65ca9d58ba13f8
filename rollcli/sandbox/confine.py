"""What a process gives up before it runs foreign code: namespaces, identity, limits, files and system calls.

Root changes to a uid drawn for the program, for root is exempt from the limit on processes. When Python's tree is not
readable for others, as below `/root`, the program keeps the capability to read past file modes; Landlock decides.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from dataclasses import dataclass

from rollcli.sandbox import landlock, seccomp

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNS, _NEWIPC, _NEWUSER, _NEWPID = 0x00020000, 0x08000000, 0x10000000, 0x20000000
_REC, _PRIVATE, _NOSUID, _NODEV, _NOEXEC, _DETACH = 0x4000, 1 << 18, 2, 4, 8, 2
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_KEEPCAPS, _SET_NO_NEW_PRIVS, _CAP_AMBIENT = 1, 4, 8, 38, 47
_CAPABILITY_VERSION_3, _CAP_DAC_READ_SEARCH = 0x20080522, 2
_UID_SPREAD = 1 << 28
INODES = 4096
FILES = 128
STACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Bounds:
    """What one program may use; the part of `base.Limits` that the kernel keeps.

    Attributes:
        memory_bytes: address space of each process.
        cpu_s: seconds of CPU of each process.
        disk_bytes: the temporary folder's size, and that of any one file.
        processes: how many at once; 1 refuses forks.
        threads: how many at once besides the processes' first.
    """

    memory_bytes: int
    cpu_s: int
    disk_bytes: int
    processes: int
    threads: int


def enter_namespaces() -> bool:
    """Moves to mount, pid (for what is forked next) and IPC namespaces of its own; False where that is not allowed."""
    uid, gid = os.getuid(), os.getgid()
    flags = _NEWNS | _NEWPID | _NEWIPC | (0 if uid == 0 else _NEWUSER)
    if _LIBC.unshare(flags):
        return False
    if uid != 0:
        for name, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    return True


def mount_folder(folder: str, size: int, fresh: bool) -> bool:
    """Mounts an empty file system at `folder`, in place of the last unless `fresh`; False if refused."""
    if fresh:
        _LIBC.mount(None, b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None)
    else:
        _LIBC.umount2(folder.encode(), _DETACH)
    options = f"size={size},nr_inodes={INODES},mode=0755"
    flags = ctypes.c_ulong(_NOSUID | _NODEV | _NOEXEC)
    return _LIBC.mount(b"tmpfs", folder.encode(), b"tmpfs", flags, options.encode()) == 0


def draw_uid() -> int:
    """Returns the uid a program is to run under: one that nobody else has, or the own one without root's rights."""
    if os.getuid() != 0:
        return os.getuid()
    drawn = int.from_bytes(os.urandom(4), "big") % _UID_SPREAD
    with open("/proc/self/uid_map") as file:
        first, _, count = max((tuple(map(int, line.split())) for line in file), key=lambda entry: entry[2])
    return first + count // 2 + drawn % (count // 2) if count > 1 else 0


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; ends at once if it has."""
    _LIBC.prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def hide() -> None:
    """Keeps this process's memory, and that of what it forks, from others of the same user."""
    _LIBC.prctl(_SET_DUMPABLE, ctypes.c_ulong(0), 0, 0, 0)


def others_may_read(path: str) -> bool:
    """Returns whether any user may read below a folder, by the modes on the way to it."""
    while os.stat(path).st_mode & 0o5 == 0o5 and path != "/":
        path = os.path.dirname(path)
    return path == "/"


def confine(bounds: Bounds, uid: int, readable: list[str], folder: str, writable: bool, parent: int,
            namespaces: bool) -> None:  # fmt: skip
    """Confines this process for good; what runs after it may be anything. Raises OSError when any part is refused.

    Args:
        uid: to change to, as `draw_uid` gave it.
        readable: files and folders that may be read.
        folder: the temporary folder; the program may write there if `writable`.
        parent: pid of the process that is to outlive this one, as it is seen from here.
        namespaces: whether `enter_namespaces` worked; then none but its own processes count against the limit.
    """
    abi = landlock.version()
    rules = landlock.ruleset([*readable, folder], [os.devnull, *([folder] if writable else [])]) if abi else None
    _limit(bounds, _threads_of(uid) if uid == os.getuid() and not namespaces else 0)
    keeps = os.getuid() == 0 and abi > 0 and not others_may_read(os.path.dirname(os.__file__))
    _become(uid, keeps)
    die_with(parent)
    if _LIBC.prctl(_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0):
        raise OSError("no_new_privs is refused")
    if rules is not None:
        landlock.restrict(rules)
    seccomp.install(seccomp.build(bounds.processes > 1, signals=abi >= landlock.SIGNALS_SCOPED))


def _limit(bounds: Bounds, others: int) -> None:
    tasks = others + bounds.processes + bounds.threads
    limits = {
        resource.RLIMIT_AS: bounds.memory_bytes,
        resource.RLIMIT_FSIZE: bounds.disk_bytes,
        resource.RLIMIT_NPROC: tasks,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for kind, value in limits.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (bounds.cpu_s, bounds.cpu_s + 1))


def _threads_of(uid: int) -> int:
    """Counts what the limit on processes counts: all threads of a user, that of the program's own host among them."""
    count = 0
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdecimal() and entry.stat().st_uid == uid:
                count += len(os.listdir(f"{entry.path}/task"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return count


def _become(uid: int, keeps: bool) -> None:
    """Changes to a user with no groups and no capability, but that to read past file modes if `keeps`."""
    if os.getuid() == 0:
        if uid == 0:
            raise OSError("root has no other user id to run a program under")
        _LIBC.prctl(_SET_KEEPCAPS, ctypes.c_ulong(keeps), 0, 0, 0)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    kept = 1 << _CAP_DAC_READ_SEARCH if keeps else 0
    sets = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)  # effective, permitted, inheritable; low, then high
    if _LIBC.capset(header, sets):
        raise OSError(ctypes.get_errno(), "capset is refused")
    if keeps:
        _LIBC.prctl(_CAP_AMBIENT, ctypes.c_ulong(2), ctypes.c_ulong(_CAP_DAC_READ_SEARCH), 0, 0)
