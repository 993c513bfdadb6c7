"""`KeptServers`: fork servers that outlive their sandboxes. Each would import torch and Triton again, for seconds.

A command line that a test runs in this process gets the server that the one before had left, with children as fresh as
ever. Rooms that test the lives of servers do without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kernel_agent.sandbox import environment
from kernel_agent.sandbox.fork_server import ForkServer

Surroundings = tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]
"""What a server has from the process that starts it: modules, search path, environment."""


class KeptServers:
    """Servers that nobody uses, by what they were started with. Stands where sandboxes look for `ForkServer`."""

    def __init__(self, more: Sequence[str]) -> None:
        """`more`: modules that every server imports first."""
        self.more = tuple(more)
        self.idle: dict[Surroundings, list[ForkServer]] = {}

    def __call__(self, preload: Sequence[str]) -> ForkServer:
        """A server for a sandbox: one that runs, if there is one of the kind."""
        modules = (*self.more, *(name for name in preload if name not in self.more))
        key = (modules, tuple(sys.path), tuple(sorted(environment.scrubbed(os.environ).items())))
        waiting = self.idle.setdefault(key, [])
        return waiting.pop() if waiting else _Kept(modules, waiting)

    def close(self) -> None:
        """End them all."""
        for waiting in self.idle.values():
            for server in waiting:
                ForkServer.close(server)
        self.idle.clear()


class _Kept(ForkServer):
    """One that waits for the next sandbox when its own is closed."""

    def __init__(self, preload: Sequence[str], waiting: list[ForkServer]) -> None:
        super().__init__(preload)
        self._waiting = waiting

    def close(self) -> None:
        """Of a sandbox whose jobs have ended. A server that has not got through its imports ends."""
        if self._ready and self._process is not None and self._process.poll() is None:
            self._waiting.append(self)
        else:
            super().close()
