"""The fork server: a process that has torch and triton imported and forks a warden for every job.

It stays single-threaded (a fork keeps only one thread, and another's locks would stay locked) and never touches
torch.cuda, Triton's active driver or any library that starts threads. It holds no secret: it was executed with a
scrubbed environment, so its children's memory contains none. It ends when its socket closes, that is when the parent
closes it or dies.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from types import FrameType

from kernel_agent.sandbox import large_pages, linux, process_tree
from kernel_agent.sandbox.namespaces import system_places
from kernel_agent.sandbox.runtime import LaunchRequest
from kernel_agent.sandbox.warden import run_warden

REQUEST_BYTES = 128 << 10
FDS_PER_JOB = 4


class Server:
    """Waits for requests on one socket and forks."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._wardens: set[int] = set()

    def serve(self) -> None:
        """Fork until the socket closes."""
        linux.name_process("ka-server")
        linux.adopt_orphans()
        signal.signal(signal.SIGCHLD, self._bury)
        pages = large_pages.collapse()
        while True:
            while not select.select([self._requests], [], [], 0)[0] and next(pages, self) is None:
                pass  # one page more while nobody asks
            data, handles, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, FDS_PER_JOB)
            if not data:
                return
            self._launch(LaunchRequest.model_validate_json(data), handles)

    def _launch(self, request: LaunchRequest, handles: list[int]) -> None:
        channel, control, out, err = handles
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # a warden is listed before its end is noticed
        warden = os.fork()
        if warden == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            self._requests.close()
            run_warden(request, socket.socket(fileno=channel), socket.socket(fileno=control), out, err)
        self._wardens.add(warden)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for handle in handles:
            os.close(handle)

    def _bury(self, _number: int, _frame: FrameType | None) -> None:
        """Reap wardens; whatever else became a child of the server lost its warden to a killer and is killed."""
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            self._wardens.discard(pid)
        for orphan in process_tree.children(os.getpid()):
            if orphan not in self._wardens:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)


def main(socket_number: int, preload: list[str]) -> None:
    """Import, say that it is ready, serve. An import error goes to stderr and ends the process."""
    requests = socket.socket(fileno=socket_number)
    sys.dont_write_bytecode = False  # the environment says otherwise for the children's sake
    for name in preload:
        importlib.import_module(name)
    sys.dont_write_bytecode = True
    system_places()
    gc.collect()
    gc.freeze()  # keeps the collector from touching, and thereby copying, the pages that children share
    threads = len(os.listdir("/proc/self/task"))
    requests.send(json.dumps({"ready": os.getpid(), "threads": threads}).encode())
    Server(requests).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
