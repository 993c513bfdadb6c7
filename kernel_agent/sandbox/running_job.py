"""The parent's side of one job: feeds the child, reads its frames and output, and waits for the warden's last word."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kernel_agent.sandbox.ending import Evidence, judge
from kernel_agent.sandbox.frames import Budget, Frame, FrameKind, FrameReader, ProtocolError, encode
from kernel_agent.sandbox.job import ChildError, Job, Message, Protection, Report
from kernel_agent.sandbox.left_files import look_for_files
from kernel_agent.sandbox.runtime import LaunchRequest
from kernel_agent.sandbox.tail import Tail
from kernel_agent.sandbox.warden import Aftermath, Birth, remove_scratch

_POLL_S = 0.05
_WARDEN_GRACE_S = 30.0
_RECEIVE = 64 << 10


class _Hello(BaseModel):
    """The child's first frame."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    protections: tuple[Protection, ...] = Field(max_length=32)


class RunningJob:
    """One job from launch to burial. A context manager: leaving it ends whatever still runs."""

    def __init__(self, job: Job, launch: Callable[[LaunchRequest, list[int]], None]) -> None:
        self._job = job
        self._outgoing = deque(encode(FrameKind.JOB, job.payload, job.tensors))
        self._reader = FrameReader(Budget(job.limits.output_bytes, job.limits.record_bytes))
        self._messages: list[Message] = []
        self._protections: tuple[Protection, ...] | None = None
        self._last_word: FrameKind | None = None
        self._error: ChildError | None = None
        self._protocol_error: str | None = None
        self._out, self._err = Tail(job.limits.text_bytes), Tail(job.limits.text_bytes)
        self._warden_says = bytearray()
        self._start = time.monotonic()
        self._deadline = self._start + job.limits.wall_s + _WARDEN_GRACE_S
        self._scratch = Path(tempfile.mkdtemp(prefix="kernel-agent-")).resolve()
        self._channel, child_channel = socket.socketpair()
        self._control, warden_control = socket.socketpair()
        self._out_pipe, child_out = os.pipe()
        self._err_pipe, child_err = os.pipe()
        try:
            launch(self._request(), [child_channel.fileno(), warden_control.fileno(), child_out, child_err])
        except BaseException:
            self._close()
            raise
        finally:
            child_channel.close()
            warden_control.close()
            os.close(child_out)
            os.close(child_err)
        self._select = selectors.DefaultSelector()
        for sock in (self._channel, self._control):
            sock.setblocking(False)
        for pipe in (self._out_pipe, self._err_pipe):
            os.set_blocking(pipe, False)
        self._select.register(self._channel, selectors.EVENT_READ | selectors.EVENT_WRITE, self._on_channel)
        self._select.register(self._control, selectors.EVENT_READ, self._on_control)
        self._select.register(self._out_pipe, selectors.EVENT_READ, lambda _: self._on_pipe(self._out_pipe, self._out))
        self._select.register(self._err_pipe, selectors.EVENT_READ, lambda _: self._on_pipe(self._err_pipe, self._err))
        self._buried = False

    def _request(self) -> LaunchRequest:
        job = self._job
        return LaunchRequest(
            label=job.label,
            entry=job.entry,
            scratch=self._scratch,
            readable=tuple(path.resolve() for path in job.readable),
            search_path=tuple(os.path.abspath(entry) for entry in sys.path),
            limits=job.limits,
        )

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the job if it still runs (Ctrl-C, a failing `on_message`), then give back everything it held."""
        if not self._buried:
            self.cancel()
            while not self._buried:
                for key, _ in self._select.select(_POLL_S):
                    if key.fileobj is self._control:
                        self._on_control(selectors.EVENT_READ)
                self._kill_stuck_warden()
        self._select.close()
        self._close()

    def _close(self) -> None:
        self._channel.close()
        self._control.close()
        os.close(self._out_pipe)
        os.close(self._err_pipe)
        remove_scratch(self._scratch)

    def cancel(self) -> None:
        """Tell the warden to end everything. Returns at once."""
        self._deadline = min(self._deadline, time.monotonic() + _WARDEN_GRACE_S)
        try:
            self._control.shutdown(socket.SHUT_WR)
        except OSError:  # the warden has already gone
            return

    def follow(self, cancelled: Callable[[], bool]) -> Iterable[Message]:
        """Yield messages as they come, until the job is over."""
        handed, told = 0, False
        while not self._buried:
            for key, events in self._select.select(_POLL_S):
                key.data(events)
            self._kill_stuck_warden()
            if not told and (cancelled() or self._protocol_error is not None):
                told = True
                self.cancel()
            yield from self._messages[handed:]
            handed = len(self._messages)
        self._drain()
        yield from self._messages[handed:]

    @property
    def began(self) -> bool:
        """True once a warden has forked the child."""
        return bool(self._lines())

    def report(self) -> Report:
        """What is to be said when `follow` is through."""
        aftermath = self._aftermath()
        ending, sentence = judge(
            Evidence(self._job.limits, self._last_word, self._error, self._protocol_error, aftermath)
        )
        return Report(
            ending=ending,
            message=sentence,
            messages=tuple(self._messages),
            error=self._error,
            exit_code=aftermath.exit_code if aftermath else None,
            signal=aftermath.signal if aftermath else None,
            stdout_tail=self._out.text(),
            stderr_tail=self._err.text(),
            seconds=aftermath.seconds if aftermath else time.monotonic() - self._start,
            peak_bytes=aftermath.peak_bytes if aftermath else 0,
            protections=self._protections or (),
            left_behind=aftermath.left_behind if aftermath else 0,
            left_files=look_for_files(self._scratch, self._job.own_files),
            survivors=aftermath.survivors if aftermath else (),
        )

    def _on_channel(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._feed()
        if events & selectors.EVENT_READ:
            try:
                for frame in self._reader.pump(self._channel):
                    self._accept(frame)
            except (ProtocolError, ValidationError) as error:
                self._protocol_error = (
                    str(error) if isinstance(error, ProtocolError) else "the child sent a malformed record"
                )
            if self._reader.ended or self._protocol_error is not None:
                self._select.unregister(self._channel)

    def _feed(self) -> None:
        try:
            while self._outgoing:
                sent = self._channel.send(self._outgoing[0])
                self._outgoing[0] = self._outgoing[0][sent:]
                if not self._outgoing[0]:
                    self._outgoing.popleft()
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):  # it died while being fed; the warden will tell how
            self._outgoing.clear()
        self._select.modify(self._channel, selectors.EVENT_READ, self._on_channel)

    def _accept(self, frame: Frame) -> None:
        if (self._protections is None) != (frame.kind is FrameKind.HELLO) or self._last_word is not None:
            raise ProtocolError(f"the child sent {frame.kind.name} out of turn")
        if frame.kind is FrameKind.HELLO:
            self._protections = _Hello.model_validate(frame.record).protections
        elif frame.kind is FrameKind.MESSAGE:
            self._messages.append(Message(frame.record, frame.tensors))
        elif frame.kind is FrameKind.RAISED:
            self._last_word, self._error = frame.kind, ChildError.model_validate(frame.record)
        elif frame.kind is FrameKind.FINISHED:
            self._last_word = frame.kind
        else:
            raise ProtocolError(f"the child sent {frame.kind.name}, which only the parent sends")

    def _on_control(self, _events: int) -> None:
        try:
            data = self._control.recv(_RECEIVE)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data = b""
        self._warden_says += data
        if not data:
            self._buried = True

    def _on_pipe(self, pipe: int, tail: Tail) -> None:
        try:
            data = os.read(pipe, _RECEIVE)
        except BlockingIOError:
            return
        if data:
            tail.add(data)
        else:
            self._select.unregister(pipe)

    def _drain(self) -> None:
        """Read what the dead have left in the channel and the pipes."""
        self._select.unregister(self._control)
        while self._select.get_map():
            ready = [key for key, events in self._select.select(0) if events & selectors.EVENT_READ]
            if not ready:
                return
            for key in ready:
                key.data(selectors.EVENT_READ)

    def _lines(self) -> list[bytes]:
        return bytes(self._warden_says).splitlines()

    def _aftermath(self) -> Aftermath | None:
        lines = self._lines()
        return Aftermath.model_validate_json(lines[1]) if len(lines) == 2 else None

    def _kill_stuck_warden(self) -> None:
        """A warden that a hostile child has stopped cannot keep its own clock."""
        lines = self._lines()
        if time.monotonic() > self._deadline and lines and not self._buried:
            os.kill(Birth.model_validate_json(lines[0]).warden, signal.SIGKILL)
