"""`EmbeddingServer`: answers OpenAI's embeddings on 127.0.0.1, with the last vector first, as no client may mind."""

from __future__ import annotations

import json
import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

DIMENSIONS = 32


def vector_of(text: str) -> list[float]:
    """How often the words of a text fall into each of a few drawers: texts that share words are near."""
    counts = [0.0] * DIMENSIONS
    for word in text.lower().split():
        counts[zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
    return counts


class EmbeddingServer:
    """A context manager; `status` other than 200 refuses, `lost` vectors are left out of each answer."""

    def __init__(self, *, status: int = 200, lost: int = 0) -> None:
        self.status, self.lost = status, lost
        self.requests: list[dict[str, Any]] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    @property
    def url(self) -> str:
        """What OPENAI_BASE_URL is set to."""
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """What is sent for a request."""
        self.requests.append(body)
        if self.status != 200:
            return {"error": {"message": "the server says no", "type": "error", "param": None, "code": None}}
        rows = [{"object": "embedding", "index": n, "embedding": vector_of(t)} for n, t in enumerate(body["input"])]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return {"object": "list", "model": body["model"], "data": rows[self.lost :][::-1], "usage": usage}

    def __enter__(self) -> EmbeddingServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _handler(server: EmbeddingServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/embeddings"
            told = server.answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            body = json.dumps(told).encode()
            self.send_response(server.status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Tests read `EmbeddingServer.requests` instead."""

    return Handler
