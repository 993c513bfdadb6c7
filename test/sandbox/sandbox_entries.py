"""Entries that the sandbox tests run in children: honest ones and hostile ones."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from kernel_agent.sandbox import Call


def echo(call: Call) -> None:
    call.send({"payload": call.payload, "label": call.label}, call.tensors)


def say_nothing(call: Call) -> None:
    pass


def count(call: Call) -> None:
    for number in range(call.payload["n"]):
        call.send({"number": number})


def loop(call: Call) -> None:
    call.send({"pids": [os.getpid()]})
    while True:
        pass


def sleep(call: Call) -> None:
    call.send({"pids": [os.getpid()]})
    time.sleep(600)


def leave_with_status_zero(call: Call) -> None:
    call.send({"claim": "all is well"})
    os._exit(0)


def exit_politely(call: Call) -> None:
    sys.exit(0)


def segfault(call: Call) -> None:
    ctypes.string_at(0)


def kill_itself(call: Call) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def allocate(call: Call) -> None:
    held = []
    for _ in range(call.payload["mebibytes"]):
        held.append(bytearray(os.urandom(1 << 20)))


def fill_memory_nobody_holds(call: Call) -> None:
    """A gigabyte in a file in memory that is mapped nowhere."""
    handle = os.memfd_create("held")
    for _ in range(1024):
        os.write(handle, b"x" * (1 << 20))


def raise_value_error(call: Call) -> None:
    def inner(size: int) -> None:
        raise ValueError(f"tile of {size} does not divide N")

    inner(48)


def raise_unprintable(call: Call) -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    raise Rude


def recurse(call: Call) -> None:
    recurse(call)


def import_broken_source(call: Call) -> None:
    compile("def f(:\n    pass\n", "candidate.py", "exec")


def outlive(call: Call) -> None:
    """A grandchild in a session of its own, whose parent dies at once, that ignores every signal it can."""
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            os.write(writer, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.waitpid(parent, 0)  # else it may be counted, too, where the machine is busy
    call.send({"pids": [int(os.read(reader, 32))]})


def outlive_and_loop(call: Call) -> None:
    outlive(call)
    loop(call)


def bomb(call: Call) -> None:
    while True:
        os.fork()


def many_threads(call: Call) -> None:
    for _ in range(call.payload["threads"]):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    time.sleep(600)


def return_twice(call: Call) -> None:
    os.fork()


def shout(call: Call) -> None:
    for _ in range(call.payload["mebibytes"]):
        sys.stdout.write("x" * (1 << 20))
        sys.stderr.write("y" * (1 << 20))
    print("last line")


def outcome(call: Call) -> None:
    """Try one thing that is forbidden and report what came of it."""
    try:
        answer = ATTEMPTS[call.payload["attempt"]](call)
    except OSError as error:
        call.send({"refused": type(error).__name__})
    else:
        call.send({"done": str(answer)})


def _connect(call: Call) -> object:
    return socket.create_connection(("127.0.0.1", call.payload["port"]), timeout=5)


def _udp(call: Call) -> object:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        return sender.sendto(b"secret", ("192.0.2.1", 53))


def _abstract_socket(call: Call) -> object:
    with socket.socket(socket.AF_UNIX) as sender:
        return sender.connect(call.payload["address"].replace("@", "\0"))


def _path_socket(call: Call) -> object:
    with socket.socket(socket.AF_UNIX) as sender:
        return sender.connect(call.payload["path"])


def _path_datagram(call: Call) -> object:
    """A pair needs no `socket`, and a datagram no `connect`."""
    sender, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    return sender.sendto(b"stop the machine", call.payload["path"])


def _system_call(call: Call) -> object:
    """One system call by number, with arguments under which the kernel itself would not say EPERM."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_long(word) for word in call.payload["arguments"]]
    if libc.syscall(ctypes.c_long(call.payload["number"]), *arguments) < 0:
        return os.strerror(ctypes.get_errno())
    return "it was carried out"


def _environments(call: Call) -> object:
    """Every environment that can be read, of this process and all others."""
    found = [" ".join(f"{name}={value}" for name, value in os.environ.items())]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            found.append((folder / "environ").read_bytes().decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(found)


def _compile_c(call: Call) -> object:
    source = call.scratch / "a.c"
    source.write_text('#include <stdio.h>\nint main(void) { puts("compiled"); return 0; }\n')
    subprocess.run([os.environ.get("CC", "cc"), str(source), "-o", str(call.scratch / "a.out")], check=True)
    return subprocess.run([str(call.scratch / "a.out")], check=True, capture_output=True, text=True).stdout


ATTEMPTS = {
    "write": lambda call: Path(call.payload["path"]).write_text("changed"),
    "read": lambda call: Path(call.payload["path"]).read_text(),
    "list": lambda call: os.listdir(call.payload["path"]),
    "list numbers": lambda call: sorted(int(name) for name in os.listdir(call.payload["path"]) if name.isdigit()),
    "delete": lambda call: os.unlink(call.payload["path"]),
    "truncate": lambda call: os.truncate(call.payload["path"], 0),
    "link": lambda call: os.link(call.payload["path"], call.scratch / "link"),
    "big file": lambda call: (call.scratch / "big").write_bytes(b"0" * call.payload["bytes"]),
    "scratch": lambda call: (call.scratch / "own.txt").write_text("fine"),
    "connect": _connect,
    "udp": _udp,
    "abstract socket": _abstract_socket,
    "path socket": _path_socket,
    "path datagram": _path_datagram,
    "system call": _system_call,
    "signal": lambda call: os.kill(call.payload["pid"], 0),
    "mount": lambda call: ctypes_mount(),
    "environments": _environments,
    "compile": _compile_c,
    "temporary": lambda call: __import__("tempfile").mkdtemp(),
}


def ctypes_mount() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", b"/mnt", b"tmpfs", 0, None) != 0:
        raise OSError(ctypes.get_errno(), "mount")


def raw_bytes(call: Call) -> None:
    """Write to the private channel what no honest runtime writes."""
    call._channel.sendall(bytes.fromhex(call.payload["hex"]))
    time.sleep(600)


def endless_messages(call: Call) -> None:
    while True:
        call.send({}, {"x": torch.zeros(1 << 20)})


def expanded_giant(call: Call) -> None:
    call.send({}, {"x": torch.zeros(1).expand(1 << 40)})


def stop_in_a_frame(call: Call) -> None:
    call._channel.sendall(b"KAF1\x03")


def deep_scratch(call: Call) -> None:
    """A scratch folder that a plain recursive delete cannot delete."""
    call.send({"scratch": str(call.scratch)})
    os.chdir(call.scratch)
    for _ in range(1500):
        os.mkdir("d")
        os.chdir("d")
    (call.scratch / "locked").mkdir()
    (call.scratch / "locked" / "file").write_text("x")
    (call.scratch / "locked").chmod(0)


def leave_files(call: Call) -> None:
    """Files with names that a terminal would obey, among folders, links and a cache."""
    (call.scratch / "\x1b[2Jname").write_text("x")
    (call.scratch / "folder" / "inner").mkdir(parents=True)
    (call.scratch / "folder" / "inner" / "file").write_text("x")
    (call.scratch / "link").symlink_to("/usr")
    (call.scratch / "triton").mkdir()
    (call.scratch / "triton" / "kernel").write_text("x")
    (call.scratch / "mine").write_text("x")


def describe_process(call: Call) -> None:
    import triton

    call.send(
        {
            "threads": len(os.listdir("/proc/self/task")),
            "cuda": torch.cuda.is_initialized(),
            "driver": triton.runtime.driver._active is not None if hasattr(triton.runtime.driver, "_active") else False,
            "torch threads": torch.get_num_threads(),
            "modules": sorted(sys.modules),
            "home": os.environ["HOME"],
            "scratch": str(call.scratch),
            "leader": os.getsid(0) == os.getpid(),
            "fds": sorted(
                os.readlink(f"/proc/self/fd/{fd}")
                for fd in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{fd}")
            ),
        }
    )


def combine_forms(call: Call) -> None:
    """Arithmetic on tensors without contents."""
    form = torch.empty(3, 4, device="meta")
    found = torch.where(form > 0, form.exp() / 2, form.mean(0))
    call.send({"shape": list(found.shape), "compiler": "torch._dynamo" in sys.modules})


def launch_a_kernel(call: Call) -> None:
    """Compile and run a Triton kernel on the GPU: ptxas, the C compiler, the driver's devices, the kernel cache."""
    import triton
    from sandbox_kernel import double_kernel

    x = torch.arange(1000.0, device="cuda")
    y = torch.empty_like(x)
    double_kernel[(triton.cdiv(1000, 256),)](x, y, 1000, BLOCK=256)
    call.send({"cached": len(list((call.scratch / "triton").iterdir()))}, {"y": y})
