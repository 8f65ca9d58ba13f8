"""Landlock by ctypes: a thread gives up, for good, every file but those named (Linux 5.13; `man 7 landlock`)."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Iterable

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same on every architecture

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
READ = EXECUTE | READ_FILE | READ_DIR
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | 1 << 14 | 1 << 15
_MAKE_DEVICE = 1 << 6 | 1 << 11  # character and block devices
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of file rights of each ABI: 2 adds moves between folders, 3 truncation, 5 ioctl on devices."""
_TCP = 0b11
_SCOPE = 0b11  # abstract UNIX sockets, signals
SIGNALS_SCOPED = 6


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """Returns the kernel's Landlock ABI, 0 when it has none or it is switched off."""
    return max(0, _LIBC.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1)))


def ruleset(readable: Iterable[str], writable: Iterable[str] = ()) -> int:
    """Returns a file descriptor for `restrict`: paths that may be read and executed, and folders for all but devices.

    Raises:
        OSError: the kernel refuses. Paths that do not exist are left out.
    """
    abi = version()
    files = (1 << _RIGHTS[min(abi, 5)]) - 1
    rules = _Ruleset(files, _TCP if abi >= 4 else 0, _SCOPE if abi >= SIGNALS_SCOPED else 0)
    size = 24 if abi >= SIGNALS_SCOPED else 16 if abi >= 4 else 8
    handle = _checked(_LIBC.syscall(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0)))
    for path in readable:
        _allow(handle, path, READ)
    for path in writable:
        _allow(handle, path, files & ~_MAKE_DEVICE & ~EXECUTE)
    return handle


def restrict(handle: int) -> None:
    """Applies a ruleset to this thread and all it starts; `no_new_privs` must be set. Raises OSError."""
    _checked(_LIBC.syscall(_RESTRICT, ctypes.c_int(handle), ctypes.c_uint32(0)))
    os.close(handle)


def _allow(handle: int, path: str, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _FILE_RIGHTS
        rule = _PathBeneath(rights, parent)
        _checked(_LIBC.syscall(_ADD, ctypes.c_int(handle), ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0)))
    finally:
        os.close(parent)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result
