"""A seccomp filter by ctypes: system calls that a program has no business with fail, in every thread, for good.

What is refused reaches beyond the process (sockets, ptrace, signals to others, shared memory that no limit counts),
opens the kernel (bpf, io_uring, mounts, namespaces, keys), or is newer than this list.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_SECCOMP, _MODE_FILTER, _PR_SET_PDEATHSIG = 22, 2, 1
_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020080  # mount, cgroup, uts, ipc, user, pid, net, time
_X32 = 0x40000000

# name: (x86-64, arm64); -1 where an architecture lacks the call.
_DENIED = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200),
    "listen": (50, 201), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "sched_setaffinity": (203, 122), "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118), "sched_setattr": (314, 274), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "bpf": (321, 280),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "io_setup": (206, 0), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "sethostname": (170, 161), "setdomainname": (171, 162), "personality": (135, 92), "vhangup": (153, 58),
    "fanotify_init": (300, 262), "inotify_init": (253, -1), "inotify_init1": (294, 26), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    "uselib": (134, -1), "ustat": (136, -1), "sysfs": (139, -1), "mknod": (133, -1), "mknodat": (259, 33),
    "quotactl_fd": (443, 443), "landlock_restrict_self": (446, 446), "setuid": (105, 146), "setgid": (106, 144),
    "setresuid": (117, 147), "setresgid": (119, 149), "setgroups": (116, 159), "capset": (126, 91),
}  # fmt: skip
_SIGNALS = {"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131)}
_FORKS = {"fork": (57, -1), "vfork": (58, -1)}
_CLONE, _PRCTL, _PRLIMIT, _CLONE3, _NEWEST = (56, 220), (157, 167), (302, 261), 435, 450
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def supported() -> bool:
    """Returns whether the system calls of this machine are known here."""
    return platform.machine() in _ARCHITECTURES


def build(forks: bool, signals: bool) -> bytes:
    """Returns the filter as BPF instructions.

    Args:
        forks: allow new processes; threads always are.
        signals: allow `kill`, for something else keeps signals inside.
    """
    column, architecture = _ARCHITECTURES[platform.machine()]
    calls = {**_DENIED, **({} if signals else _SIGNALS), **({} if forks else _FORKS)}
    refused, missing = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE), (_JUMP_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, _NEWEST + 1), (_RETURN, 0, 0, missing),  # the 32-bit calls of x86-64 (x32) among them
        # Its flags are behind a pointer, which a filter cannot follow; the C library then takes `clone`.
        (_JUMP_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, missing),
    ]  # fmt: skip
    for numbers in calls.values():
        if numbers[column] >= 0:
            code += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, refused)]
    clone = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_JUMP_BITS, 0, 1, _CLONE_NAMESPACES), (_RETURN, 0, 0, refused)]
    if not forks:
        clone += [(_JUMP_BITS, 1, 0, _CLONE_THREAD), (_RETURN, 0, 0, refused)]
    prctl = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_JUMP_EQUAL, 0, 1, _PR_SET_PDEATHSIG), (_RETURN, 0, 0, refused)]
    prlimit = [(_LOAD, 0, 0, _FIRST_ARGUMENT), (_JUMP_EQUAL, 1, 0, 0), (_RETURN, 0, 0, refused)]  # only its own limits
    for numbers, block in ((_CLONE, clone), (_PRCTL, prctl), (_PRLIMIT, prlimit)):
        block = [*block, (_RETURN, 0, 0, _ALLOW)]
        code += [(_JUMP_EQUAL, 0, len(block), numbers[column]), *block]
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def install(program: bytes) -> None:
    """Applies a filter to this thread and all it starts; `no_new_privs` must be set. Raises OSError."""
    argument = _Program(len(program) // 8, program)
    if _LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_MODE_FILTER), ctypes.byref(argument), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
