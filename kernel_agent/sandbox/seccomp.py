"""A filter of system calls, written by libseccomp, which systemd, container engines and package managers rest on too.

The filter is a list of what is refused, not of what is allowed: a GPU driver, a compiler and an interpreter call what
no list of ours could name, and Landlock already says what files and processes can be reached. What is refused are doors
that nothing honest in a child opens: other processes' memory, the kernel's own machinery, and connections.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from dataclasses import dataclass

_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_NOT_EQUAL, _MASKED_EQUAL = 1, 7
_CLONE_NEW = 0x7E020000
"""Every flag of `clone` that makes a namespace."""
_TYPE_OF_SOCKET = 0xF

_OTHERS = "ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp"
_NAMESPACES = "unshare setns chroot pivot_root"
_MOUNTS = "mount umount umount2 move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr"
_KERNEL = (
    "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register fanotify_init open_by_handle_at "
    "add_key request_key keyctl init_module finit_module delete_module kexec_load kexec_file_load reboot syslog acct "
    "swapon swapoff quotactl quotactl_fd iopl ioperm modify_ldt vhangup lookup_dcookie nfsservctl uselib "
    "settimeofday clock_settime clock_adjtime adjtimex stime sethostname setdomainname"
)
REFUSED = tuple(f"{_OTHERS} {_NAMESPACES} {_MOUNTS} {_KERNEL} connect".split())
"""Calls that fail with EPERM whatever their arguments. A socket that cannot connect reaches no socket with a path."""


class _Condition(ctypes.Structure):
    """`struct scmp_arg_cmp`: what one argument of a call must be for a rule to hold."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("comparison", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@dataclass(frozen=True)
class _Rule:
    """A call that is refused when one of its arguments says so."""

    call: str
    condition: _Condition
    error: int = errno.EPERM


_RULES = (
    _Rule("socket", _Condition(0, _NOT_EQUAL, socket.AF_UNIX, 0)),
    # A datagram needs no connection to reach a socket with a path.
    _Rule("socket", _Condition(1, _MASKED_EQUAL, _TYPE_OF_SOCKET, socket.SOCK_DGRAM)),
    _Rule("socketpair", _Condition(1, _MASKED_EQUAL, _TYPE_OF_SOCKET, socket.SOCK_DGRAM)),
    *(_Rule("clone", _Condition(0, _MASKED_EQUAL, 1 << bit, 1 << bit)) for bit in range(32) if _CLONE_NEW >> bit & 1),
)


def restrict() -> int:
    """Refuse those calls to this process and all it will start, for good. Returns how many calls are refused.

    Needs no_new_privs. Raises OSError when the library is missing or the kernel does not take the filter.
    """
    library = _library()
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not context:
        raise OSError("libseccomp could not begin a filter")
    try:
        named = [name for name in REFUSED if _add(library, context, name, errno.EPERM, None)]
        for rule in _RULES:
            _add(library, context, rule.call, rule.error, rule.condition)
        # Its flags lie in memory, where no filter can look; callers fall back on `clone`.
        _add(library, context, "clone3", errno.ENOSYS, None)
        _checked(library.seccomp_load(context), "seccomp_load")
    finally:
        library.seccomp_release(context)
    return len(named)


def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libseccomp.so.2", use_errno=True)
    except OSError:
        raise OSError("no libseccomp (`apt install libseccomp2`): every system call can be made") from None


def _add(library: ctypes.CDLL, context: ctypes.c_void_p, name: str, error: int, condition: _Condition | None) -> bool:
    """Add one rule; false where this library or this processor has no such call."""
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number < 0:
        return False
    conditions = (_Condition * 1)(condition) if condition is not None else None
    count = ctypes.c_uint(0 if condition is None else 1)
    action = ctypes.c_uint32(_ERRNO | error)
    _checked(
        library.seccomp_rule_add_array(context, action, ctypes.c_int(number), count, conditions), f"rule for {name}"
    )
    return True


def _checked(result: int, what: str) -> None:
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")
