"""Puts the walls around the process that calls it: limits, namespaces, Landlock, seccomp. There is no way back.

Every wall that this machine cannot give is reported as a missing `Protection`; the child runs nevertheless, since some
machines (gVisor, containers without user namespaces) have none of them. Who needs them all looks at the report.
"""

from __future__ import annotations

import functools
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kernel_agent.sandbox import landlock, linux, seccomp
from kernel_agent.sandbox.job import Limits, Protection

_OPEN_FILES = 1024
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store", "/run/opengl-driver"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime"),
    *("/etc/passwd", "/etc/group", "/etc/nsswitch.conf"),
    *("/proc", "/sys"),
)
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/dxg", "/dev/nvidia-caps")
STOPS = {
    "process namespace": "seeing the processes of others and signalling them, and leaving any process behind",
    "mount namespace": "changing files outside of scratch and reading home folders, where Landlock is missing",
    "resource limits": "filling the disk with one file, and dumping memory to it",
    "network namespace": "sending anything over the network, and what runs on this machine from being asked",
    "no new privileges": "becoming root through a setuid program",
    "Landlock": "reading and changing files of yours, and reaching into other processes",
    "capabilities": "what root may: mounting, raw devices, tracing",
    "seccomp": "connecting to docker.sock or an ssh-agent, reading other processes' memory, rare doors of the kernel",
}
"""What each wall keeps a child from."""
_PACKAGE = Path(__file__).resolve().parent.parent


def attempt(name: str, wall: Callable[[], str]) -> Protection:
    """Put up one wall and say whether it stands."""
    try:
        return Protection(name=name, active=True, detail=wall(), stops=STOPS[name])
    except OSError as error:
        return Protection(name=name, active=False, detail=str(error), stops=STOPS[name])


def confine(scratch: Path, readable: Iterable[Path], limits: Limits) -> tuple[Protection, ...]:
    """Apply every protection in the order in which they permit each other. Must be called single-threaded."""
    return (
        attempt("resource limits", lambda: _limit_resources(limits)),
        attempt("network namespace", _leave_network),
        attempt("no new privileges", _forbid_privileges),
        attempt("Landlock", lambda: _landlock(scratch, readable)),
        attempt("capabilities", _drop_capabilities),
        attempt("seccomp", _filter_calls),
    )


def _limit_resources(limits: Limits) -> str:
    for what, value in (
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
    ):
        hard = resource.getrlimit(what)[1]
        least = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (least, least))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    return f"files up to {limits.file_bytes >> 20} MiB, {_OPEN_FILES} open files, no core dumps, first out of memory"


def _leave_network() -> str:
    try:
        linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
        return "no network interface, own System V IPC"
    except PermissionError:  # an ordinary user, or root in a container: as root of a user namespace it is allowed
        linux.unshare_as_user(linux.CLONE_NEWNET | linux.CLONE_NEWIPC)
    return "no network interface, own System V IPC, inside a user namespace"


def _forbid_privileges() -> str:
    linux.forbid_new_privileges()
    return "setuid programs gain nothing"


def _landlock(scratch: Path, readable: Iterable[Path]) -> str:
    devices = (*(Path(name) for name in _DEVICES), *sorted(Path("/dev").glob("nvidia*")))
    rules = [(path, landlock.READ) for path in (*system_paths(), *readable)]
    rules += [(path, landlock.DEVICE) for path in devices]
    rules.append((scratch, landlock.OWN))
    # CUDA names its threads through /proc/self/task/*/comm and gives up when it cannot. The handle stays open on
    # purpose: a rule holds on to an inode, and /proc makes a new one when nothing uses the old.
    rules.append((Path("/proc/self/task"), landlock.Right.WRITE_FILE | landlock.Right.TRUNCATE))
    os.open("/proc/self/task", os.O_PATH | os.O_CLOEXEC)
    version = landlock.restrict(rules)
    if version == 0:
        raise OSError("this kernel has no Landlock: files outside the scratch folder can be read and written")
    missing = [] if version >= 4 else ["TCP"]
    missing += [] if version >= 5 else ["device ioctls"]
    missing += [] if version >= 6 else ["signals to other processes"]
    return f"ABI {version}, read-only but for the scratch folder" + (
        f"; leaves open: {', '.join(missing)}" if missing else ""
    )


def _drop_capabilities() -> str:
    # Root without CAP_DAC_OVERRIDE cannot read a checkout that a container mounts from another user.
    keep = 1 << linux.CAP_DAC_OVERRIDE if os.getuid() == 0 else 0
    linux.drop_capabilities(keep)
    return "none kept" if not keep else "only CAP_DAC_OVERRIDE kept"


def _filter_calls() -> str:
    refused = seccomp.restrict()
    return f"{refused} system calls refused, also sockets that are not unix streams, and connecting to any"


def system_paths() -> tuple[Path, ...]:
    """What any child may read: the system's libraries and programs, the interpreter, installed packages, this package.

    Home folders, the working folder, `/tmp`, `/etc` as a whole and `/dev/shm` are not among them.
    """
    installed = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    searched = [*os.environ.get("PATH", "").split(":"), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    toolkits = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    imported = [
        str(Path(path)) for name in ("torch", "triton") if name in sys.modules for path in sys.modules[name].__path__
    ]
    compilers = [os.environ.get("CC", ""), "cc", "gcc", "clang", "ptxas", "nvcc"]
    names = (
        *_SYSTEM,
        *(str(prefix) for tool in compilers for prefix in _prefixes(tool)),
        sys.prefix,
        sys.base_prefix,
        sys.exec_prefix,
        *installed,
        *searched,
        *toolkits,
        *imported,
    )
    absolute = dict.fromkeys(Path(name) for name in names if name.startswith("/") and name != "/")
    return (*absolute, _PACKAGE)


@functools.cache
def _prefixes(tool: str) -> tuple[Path, ...]:
    """Where a compiler's programs, libraries and headers lie: above the `bin` it is in, as named and as resolved."""
    found = shutil.which(tool) if tool else None
    if found is None:
        return ()
    folders = {Path(found).parent, Path(found).resolve().parent}
    prefixes = [folder.parent for folder in folders if folder.name == "bin"]
    # Never a whole home folder, for a compiler in ~/bin.
    return tuple(p for p in prefixes if p not in (Path("/"), Path("/root")) and p.parent != Path("/home"))
