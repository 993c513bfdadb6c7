"""The few Linux calls that Python's standard library does not offer, through ctypes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWIPC = 0x08000000

CAP_DAC_OVERRIDE = 1
_CAP_LAST = 63

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_CAPBSET_DROP = 24
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_EINVAL = 22

MS_NOSUID, MS_NODEV, MS_NOEXEC = 1 << 1, 1 << 2, 1 << 3
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY = 1
_MNT_DETACH = 2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _CapHeader(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


class _CapData(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(what: str, number: int, *arguments: object) -> int:
    """A raw system call. Raises OSError."""
    return _checked(int(_libc.syscall(ctypes.c_long(number), *arguments)), what)


def prctl(what: str, option: int, argument: int = 0, second: int = 0) -> int:
    """`prctl` with up to two integer arguments. Raises OSError."""
    words = [ctypes.c_ulong(word) for word in (argument, second, 0, 0)]
    return _checked(int(_libc.prctl(ctypes.c_int(option), *words)), what)


def unshare(flags: int) -> None:
    """Leave namespaces shared with the parent. Raises OSError."""
    _checked(int(_libc.unshare(ctypes.c_int(flags))), "unshare")


def unshare_as_user(flags: int) -> None:
    """As `unshare`, in a user namespace that knows this user alone: what an ordinary user may. Raises OSError."""
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER | flags)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1", encoding="ascii")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or bind a folder or a file. Raises OSError."""
    words = (source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(int(_libc.mount(*words)), f"mount {target}")


def unmount(target: str) -> None:
    """Take a mount away, whoever uses it. Raises OSError."""
    _checked(int(_libc.umount2(os.fsencode(target), _MNT_DETACH)), f"umount {target}")


def make_read_only(target: Path, *, everything_below: bool) -> None:
    """Forbid writing through a mount, and those below it. Needs Linux 5.12. Raises OSError."""
    _set_mount(target, _MountAttr(set=_MOUNT_ATTR_RDONLY), _AT_RECURSIVE if everything_below else 0)


def make_writable(target: Path) -> None:
    """Allow writing through one mount. Raises OSError."""
    _set_mount(target, _MountAttr(clear=_MOUNT_ATTR_RDONLY), 0)


def _set_mount(target: Path, attributes: _MountAttr, flags: int) -> None:
    syscall(
        "mount_setattr",
        _MOUNT_SETATTR,
        ctypes.c_int(_AT_FDCWD),
        ctypes.c_char_p(os.fsencode(target)),
        ctypes.c_uint(flags),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )


def name_process(name: str) -> None:
    """What `ps` and `top` show; at most 15 bytes."""
    _checked(
        int(_libc.prctl(ctypes.c_int(_PR_SET_NAME), ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)), "prctl(PR_SET_NAME)"
    )


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of init's."""
    prctl("prctl(PR_SET_CHILD_SUBREAPER)", _PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send a signal to this process when the thread that forked it ends."""
    prctl("prctl(PR_SET_PDEATHSIG)", _PR_SET_PDEATHSIG, signal_number)


def forbid_new_privileges() -> None:
    """No setuid program gains anything from here on; also what lets an ordinary user apply Landlock."""
    prctl("prctl(PR_SET_NO_NEW_PRIVS)", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities(keep: int = 0) -> None:
    """Give up every capability except those in the bit mask `keep`, for this process and all it will execute."""
    header = _CapHeader(_CAPABILITY_VERSION_3, 0)
    data = (_CapData * 2)()
    _checked(int(_libc.capget(ctypes.byref(header), data)), "capget")
    if not any(half.permitted for half in data):
        return
    for capability in range(_CAP_LAST + 1):
        if keep >> capability & 1:
            continue
        try:
            prctl("prctl(PR_CAPBSET_DROP)", _PR_CAPBSET_DROP, capability)
        except OSError as error:
            if error.errno == _EINVAL:  # one past the last capability of this kernel
                break
            raise
    prctl("prctl(PR_CAP_AMBIENT)", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    for half, word in zip(data, (keep & 0xFFFFFFFF, keep >> 32), strict=True):
        half.permitted &= word
        half.effective = half.permitted
        half.inheritable = 0
    _checked(int(_libc.capset(ctypes.byref(header), data)), "capset")
