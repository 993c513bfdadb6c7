"""`ScriptedServer`: an HTTP server on 127.0.0.1 that answers as a provider would, so that the real SDKs talk to it.

    with ScriptedServer(Failure(429), Answer("hello")) as server:
        model = make_model(RunConfig(file=..., base_url=server.openai_url, model="m"), run_dir)
        model.ask(...)
    server.requests[0].body["messages"]

Each request takes the next step of the script; the last step repeats for ever. The path decides the wire format.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import wire_formats
from wire_formats import Answer

__all__ = ["Answer", "Cut", "Failure", "Page", "Raw", "Request", "ScriptedServer"]


@dataclass(frozen=True)
class Failure:
    """An HTTP error, with a wait so short that retries cost no time."""

    status: int
    message: str = "the server says no"
    code: str | None = None
    retry_after_ms: int | None = 1


@dataclass(frozen=True)
class Cut:
    """The first half of an answer."""

    answer: Answer
    abrupt: bool = True
    """True: the connection breaks. False: the stream ends as if nothing were missing."""


@dataclass(frozen=True)
class Raw:
    """Exactly these bytes as a stream."""

    frames: list[bytes]


@dataclass(frozen=True)
class Page:
    """A web page with status 200, as a proxy or a wrong address sends it."""

    html: str = "<!doctype html><title>Welcome</title>"


Step = Answer | Failure | Cut | Raw | Page


@dataclass(frozen=True)
class Request:
    """One request as it came in."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


_WIRES: dict[str, Callable[[Answer], list[bytes]]] = {
    "/v1/responses": wire_formats.responses,
    "/v1/chat/completions": wire_formats.chat,
    "/v1/messages": wire_formats.messages,
}


class ScriptedServer:
    """A context manager; the server runs in a thread of its own."""

    def __init__(self, *script: Step) -> None:
        self.requests: list[Request] = []
        self._script = script
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        """What Anthropic's SDK takes as `base_url`."""
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def openai_url(self) -> str:
        """What OpenAI's SDK takes as `base_url`."""
        return self.url + "/v1"

    def take(self, request: Request) -> Step:
        """Note a request and return its step."""
        with self._lock:
            self.requests.append(request)
            return self._script[min(len(self.requests), len(self._script)) - 1]

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _handler(server: ScriptedServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle(self) -> None:
            # A client that has read enough hangs up.
            with contextlib.suppress(ConnectionError):
                super().handle()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            step = server.take(Request(self.path, headers, body))
            if isinstance(step, Failure):
                self._fail(step)
            elif isinstance(step, Page):
                self._stream([step.html.encode()], content_type="text/html; charset=utf-8")
            elif isinstance(step, Raw):
                self._stream(step.frames)
            elif isinstance(step, Answer):
                self._stream(_WIRES[self.path](step))
            else:
                frames = _WIRES[self.path](step.answer)
                self._stream(frames[: len(frames) // 2], abrupt=step.abrupt)

        def _fail(self, failure: Failure) -> None:
            error = {"message": failure.message, "code": failure.code, "type": "error", "param": None}
            body = json.dumps({"type": "error", "error": error}).encode()
            self.send_response(failure.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            if failure.retry_after_ms is not None:
                self.send_header("retry-after-ms", str(failure.retry_after_ms))
            self.end_headers()
            self.wfile.write(body)

        def _stream(
            self, frames: list[bytes], *, abrupt: bool = False, content_type: str = "text/event-stream"
        ) -> None:
            self.send_response(200)
            self.send_header("content-type", content_type)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for frame in frames:
                self.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
            self.wfile.flush()
            if abrupt:
                # Without the closing chunk the client sees a peer that vanished.
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: object) -> None:
            """Tests read `ScriptedServer.requests` instead."""

    return Handler
