"""Namespaces of processes and of mounts around a child, where the machine permits them.

    warden ┬─ first process of the namespace: `cat`, which reads what the warden never writes
           └─ child

When the first process ends, the kernel kills all others of the namespace, whatever sessions and forks there were: the
warden kills it, and if the warden dies, `cat` reads the end of its input. What the child leaves falls to it. Without
the right to such a namespace the warden's own search for descendants is all there is.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kernel_agent.sandbox import linux
from kernel_agent.sandbox.confinement import attempt, system_paths
from kernel_agent.sandbox.job import Protection

_HIDDEN = ("/home", "/root", "/tmp", "/var/tmp", "/dev/shm", "/run/user")
_SMALL = "size=64k,mode=755"


@dataclass(frozen=True)
class OwnProcesses:
    """The namespace of what this process forks from now on."""

    wall: Protection
    first: int | None
    """Process id of the first one; None without a namespace."""
    life: int | None
    """Open for writing as long as it is to live: the child closes this."""


def leave_processes(handles: Iterable[int]) -> OwnProcesses:
    """Begin a namespace for what is forked next. `handles` are open ones that the first process must not keep."""
    begun: list[int] = []
    wall = attempt("process namespace", lambda: _begin(tuple(handles), begun))
    return OwnProcesses(wall, *begun) if begun else OwnProcesses(wall, None, None)


def _begin(handles: tuple[int, ...], begun: list[int]) -> str:
    program = shutil.which("cat")
    if program is None:
        raise OSError("no program `cat`, which would be the first process")
    inside = ""
    try:
        linux.unshare(linux.CLONE_NEWPID)
    except PermissionError:
        linux.unshare_as_user(linux.CLONE_NEWPID)
        inside = ", inside a user namespace"
    reader, life = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, reader, 0), *((os.POSIX_SPAWN_CLOSE, handle) for handle in handles)]
    begun += [os.posix_spawn(program, ["ka-first"], {}, file_actions=actions), life]
    os.close(reader)
    return f"own process ids, all killed with the first of them{inside}"


def leave_mounts(scratch: Path, readable: Iterable[Path], *, own_processes: bool) -> Protection:
    """See the mounts of `_arrange_mounts` from here on; `own_processes`: this process is in a namespace of those."""
    return attempt("mount namespace", lambda: _arrange_mounts(scratch, readable, own_processes))


@functools.cache
def system_places() -> dict[str, tuple[str, ...]]:
    """What of each folder of users any child needs; found out once, in the server that forks the wardens."""
    return _inside_of_hidden(system_paths())


def _close(handles: Iterable[int]) -> None:
    for handle in handles:
        os.close(handle)


def _arrange_mounts(scratch: Path, readable: Iterable[Path], own_processes: bool) -> str:
    """All read-only but `scratch`, folders of users empty but for what is needed, `/proc` for these processes."""
    try:
        linux.unshare(linux.CLONE_NEWNS)
    except PermissionError:
        linux.unshare_as_user(linux.CLONE_NEWNS)
    linux.mount("none", "/", "", linux.MS_REC | linux.MS_PRIVATE)
    linux.mount(str(scratch), str(scratch), "", linux.MS_BIND)
    own = _inside_of_hidden((scratch, *readable))
    hidden = [folder for folder, needed in system_places().items() if _hide(folder, (*needed, *own[folder]))]
    linux.make_read_only(Path("/"), everything_below=True)
    linux.make_writable(scratch)
    open_still = "" if own_processes and _mount_processes() else "; /proc shows all processes"
    return f"read-only but for the scratch folder; empty: {', '.join(hidden)}{open_still}"


def _inside_of_hidden(paths: Iterable[Path]) -> dict[str, tuple[str, ...]]:
    """Those of `paths` that lie in, are, or hold a folder of users, as they are named and as they are."""
    names = dict.fromkeys(name for path in paths for name in (str(path), os.path.realpath(path)))
    return {folder: tuple(name for name in names if _is_in(name, folder) or _is_in(folder, name)) for folder in _HIDDEN}


def _is_in(name: str, folder: str) -> bool:
    return name == folder or name.startswith(f"{folder.rstrip('/')}/")


def _hide(folder: str, needed: tuple[str, ...]) -> bool:
    """Put an empty folder in the place of one, with what is needed of it at its own place."""
    if not os.path.isdir(folder) or os.path.islink(folder) or any(_is_in(folder, name) for name in needed):
        return False
    outermost = [name for name in needed if not any(name != other and _is_in(name, other) for other in needed)]
    inside = {name: handle for name in outermost if (handle := _opened(name)) is not None}
    linux.mount("none", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _SMALL)
    try:
        for name, handle in inside.items():
            _bind(handle, name)
    except OSError:  # rather seen than a child that cannot start
        linux.unmount(folder)
        return False
    finally:
        _close(inside.values())
    return True


def _opened(name: str) -> int | None:
    """A handle on what has this name; None where there is nothing, or nothing that this user may see."""
    try:
        return os.open(name, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None


def _bind(handle: int, name: str) -> None:
    """Make what is open appear under a name in an empty folder."""
    source = f"/proc/self/fd/{handle}"
    if os.path.isdir(source):
        os.makedirs(name, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(name), exist_ok=True)
        open(name, "w").close()
    linux.mount(source, name, "", linux.MS_BIND | linux.MS_REC)


def _mount_processes() -> bool:
    """A `/proc` of this namespace; containers that hide parts of theirs do not permit it."""
    try:
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    except OSError:
        return False
    return True
