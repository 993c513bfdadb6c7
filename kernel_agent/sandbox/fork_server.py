"""The parent's handle on the fork server process: starts it, hands it jobs, ends it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence

from kernel_agent.sandbox import environment
from kernel_agent.sandbox.job import SandboxError
from kernel_agent.sandbox.runtime import LaunchRequest
from kernel_agent.sandbox.server import REQUEST_BYTES

_START_S = 120.0
# The search path is set before anything of ours is imported, so that a checkout on the caller's path works uninstalled.
_BOOT = """
import sys
sys.path[:] = sys.argv[3].split(":")
from kernel_agent.sandbox.server import main
main(int(sys.argv[1]), sys.argv[2].split(","))
"""


class ForkServer:
    """One server process. Thread-safe."""

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = tuple(preload)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready = False

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    def launch(self, request: LaunchRequest, handles: Sequence[int]) -> None:
        """Have a warden and a child forked that own `handles`. Starts the server if need be. Raises SandboxError."""
        data = request.model_dump_json().encode()
        if len(data) > REQUEST_BYTES:
            raise SandboxError("the job names too many readable paths", remedy="name their common folder instead")
        with self._lock:
            self._start_unless_running()
            self._wait_until_ready()
            try:
                socket.send_fds(self._requests, [data], handles)
            except (BrokenPipeError, ConnectionResetError):  # it was killed since the last job: once more
                self._start()
                self._wait_until_ready()
                socket.send_fds(self._requests, [data], handles)

    def warm(self) -> None:
        """Start the server unless it runs, without waiting for its imports. Raises SandboxError."""
        with self._lock:
            self._start_unless_running()

    def _start_unless_running(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()

    def _start(self) -> None:
        self._end()
        if not sys.platform.startswith("linux"):
            raise SandboxError("candidates can only be checked on Linux", remedy="use Linux, a container or WSL 2")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        search_path = ":".join(os.path.abspath(entry) for entry in sys.path)
        owner = f"server of process {os.getpid()}"  # for readers of `ps`: all that it forks have this command line
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the server
        self._requests = ours
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, str(theirs.fileno()), ",".join(self._preload), search_path, owner],
            env=environment.scrubbed(os.environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            cwd="/",
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C in the terminal is the parent's business
        )
        theirs.close()
        self._ready = False

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        self._requests.settimeout(_START_S)
        try:
            ready = self._requests.recv(4096)
        except (TimeoutError, ConnectionResetError):
            ready = b""
        if not ready:
            assert self._process is not None
            self._process.kill()
            self._process.wait()
            said = self.log_tail()
            self._end()
            raise SandboxError(
                f"the fork server could not import {', '.join(self._preload)}: {said}",
                remedy="run `kernel-agent doctor`, which checks the installation",
            )
        self._requests.settimeout(None)
        self._ready = True

    def log_tail(self) -> str:
        """The end of what the server and its wardens wrote to stderr: empty unless something of ours broke."""
        handle = self._log.fileno()
        start = max(0, os.fstat(handle).st_size - 4096)
        return os.pread(handle, 4096, start).decode(errors="replace").strip()

    def close(self) -> None:
        """End the server and wait for it. Jobs must have ended."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._requests.close()
        if not self._ready:  # it has no children yet, and need not finish its imports
            self._process.kill()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        self._log.close()
