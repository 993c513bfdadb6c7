"""`Sandbox`: runs each job in a fresh, walled-in process and leaves nothing of it behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from kernel_agent.sandbox.fork_server import ForkServer
from kernel_agent.sandbox.job import Job, Message, Protection, Report, SandboxError
from kernel_agent.sandbox.protection import missing_walls
from kernel_agent.sandbox.running_job import RunningJob

PRELOAD = (
    "torch",
    "triton",
    "torch.fx.experimental.symbolic_shapes",
    "triton.compiler.code_generator",
    "kernel_agent.ir",
    "kernel_agent.oracle.child",
    "kernel_agent.gate.child",
    "kernel_agent.gate.replay_child",
    "kernel_agent.ir.uncompiled",
    "kernel_agent.ir.lowered_first",
    "kernel_agent.gate.modules_first",
)
"""torch loads the third, and with it sympy, at the first `empty_like` without contents, Triton the fourth when it first
compiles: in every child, for half a second of processor time. Then comes what most children run, what spares them
torch's compiler, a first kernel, and a look at all modules, which sees those that are named before it."""
_CLOSE_S = 60.0
_LAUNCHES = 2
_log = logging.getLogger(__name__)


class Sandbox:
    """Owns one fork server, started at the first job. Several threads may run jobs at the same time.

    `preload` is imported once, in the server; every child then has it for the price of a fork. What is named there must
    not start threads nor initialise a device.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._server = ForkServer(preload)
        self._closing = threading.Event()
        self._idle = threading.Condition()
        self._active = 0
        self._warned = False
        self._walled = False

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def server_pid(self) -> int | None:
        """Process id of the fork server while it runs."""
        return self._server.pid

    @property
    def keeps_apart(self) -> bool:
        """Whether no wall was missing around the last job: children that run at once cannot reach each other."""
        return self._walled

    def warm(self) -> None:
        """Start the server in the background, so that the first job waits for less. Raises SandboxError."""
        if not self._closing.is_set():
            self._server.warm()

    def run(
        self,
        job: Job,
        on_message: Callable[[Message], None] | None = None,
        *,
        cancelled: threading.Event | None = None,
    ) -> Report:
        """Run a job to its end, however it ends, and report.

        `on_message` gets every message as it arrives. Setting `cancelled` from another thread ends the job (CANCELLED),
        as does closing the sandbox. An exception in `on_message`, or Ctrl-C, ends the job and is passed on.
        Raises SandboxError when the sandbox itself does not work, TypeError when the job cannot be sent.
        """
        with self._idle:
            if self._closing.is_set():
                raise SandboxError(
                    "the sandbox is closed", remedy="use one Sandbox for the whole run, inside its `with` block"
                )
            self._active += 1
        try:
            for _ in range(_LAUNCHES):
                report = self._attempt(job, on_message, cancelled)
                if report is not None:
                    self._warn_once(report.protections)
                    return report
            raise SandboxError(
                f"the fork server dies before it starts a job: {self._server.log_tail()}",
                remedy="run `kernel-agent doctor`, and look for a memory limit on this process",
            )
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    def _attempt(
        self, job: Job, on_message: Callable[[Message], None] | None, cancelled: threading.Event | None
    ) -> Report | None:
        """Run the job once; None when the server died before the job began, so that nothing of it has happened."""
        with RunningJob(job, self._server.launch) as running:
            for message in running.follow(
                lambda: self._closing.is_set() or (cancelled is not None and cancelled.is_set())
            ):
                if on_message is not None:
                    on_message(message)
            return running.report() if running.began else None

    def close(self) -> None:
        """Cancel what runs, wait for its burial, end the server. Idempotent."""
        self._closing.set()
        with self._idle:
            self._idle.wait_for(lambda: self._active == 0, timeout=_CLOSE_S)
        self._server.close()

    def _warn_once(self, protections: tuple[Protection, ...]) -> None:
        missing = missing_walls(protections)
        self._walled = bool(protections) and not missing
        if missing and not self._warned:
            self._warned = True
            _log.warning(
                "candidates run with less protection than intended: %s",
                "; ".join(missing),
            )
