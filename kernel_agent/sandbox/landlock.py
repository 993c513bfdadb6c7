"""Landlock: the kernel's own access lists, which an unprivileged process puts on itself and can never take off.

Constants and structures are those of `linux/landlock.h`; rights that the running kernel does not know are left out, as
its documentation asks (https://docs.kernel.org/userspace-api/landlock.html).
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from kernel_agent.sandbox import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_NET_BIND_TCP, _NET_CONNECT_TCP = 1, 2
_SCOPE_ABSTRACT_UNIX_SOCKET, _SCOPE_SIGNAL = 1, 2


class Right(enum.IntFlag):
    """Things one does to files."""

    EXECUTE = 1 << 0
    WRITE_FILE = 1 << 1
    READ_FILE = 1 << 2
    READ_DIR = 1 << 3
    REMOVE_DIR = 1 << 4
    REMOVE_FILE = 1 << 5
    MAKE_CHAR = 1 << 6
    MAKE_DIR = 1 << 7
    MAKE_REG = 1 << 8
    MAKE_SOCK = 1 << 9
    MAKE_FIFO = 1 << 10
    MAKE_BLOCK = 1 << 11
    MAKE_SYM = 1 << 12
    REFER = 1 << 13
    TRUNCATE = 1 << 14
    IOCTL_DEV = 1 << 15


READ = Right.EXECUTE | Right.READ_FILE | Right.READ_DIR
DEVICE = Right.READ_FILE | Right.WRITE_FILE | Right.IOCTL_DEV | Right.TRUNCATE | Right.READ_DIR
OWN = Right((1 << 16) - 1) & ~(Right.MAKE_CHAR | Right.MAKE_BLOCK | Right.IOCTL_DEV)
_ON_FILES = Right.EXECUTE | Right.WRITE_FILE | Right.READ_FILE | Right.TRUNCATE | Right.IOCTL_DEV


class _RulesetAttr(ctypes.Structure):
    _fields_ = (("handled_fs", ctypes.c_uint64), ("handled_net", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathBeneathAttr(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def abi() -> int:
    """Version of Landlock in the running kernel; 0 when it has none."""
    try:
        return linux.syscall(
            "landlock_create_ruleset", _CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG)
        )
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EINVAL):
            return 0
        raise


def _known_rights(version: int) -> Right:
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    return Right((1 << bits) - 1)


def restrict(rules: Iterable[tuple[Path, Right]]) -> int:
    """Allow only `rules` on the file system, no TCP, and no signals or abstract sockets to processes outside.

    Paths that do not exist are passed over: what is not there cannot be reached. Needs no_new_privs. Returns the ABI
    version that was applied, 0 when the kernel has no Landlock (nothing is restricted then). Raises OSError.
    """
    version = abi()
    if version == 0:
        return 0
    known = _known_rights(version)
    attributes = _RulesetAttr(
        int(known),
        _NET_BIND_TCP | _NET_CONNECT_TCP if version >= 4 else 0,
        _SCOPE_ABSTRACT_UNIX_SOCKET | _SCOPE_SIGNAL if version >= 6 else 0,
    )
    size = ctypes.sizeof(attributes) if version >= 6 else 16 if version >= 4 else 8
    ruleset = linux.syscall(
        "landlock_create_ruleset", _CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0)
    )
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & known)
        linux.syscall("landlock_restrict_self", _RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: Path, rights: Right) -> None:
    try:
        handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return
    try:
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            rights &= _ON_FILES
        rule = _PathBeneathAttr(int(rights), handle)
        linux.syscall(
            "landlock_add_rule",
            _ADD_RULE,
            ctypes.c_int(ruleset),
            ctypes.c_int(_RULE_PATH_BENEATH),
            ctypes.byref(rule),
            ctypes.c_uint32(0),
        )
    finally:
        os.close(handle)
