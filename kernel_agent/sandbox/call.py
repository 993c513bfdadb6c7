"""`Call`: what an entry gets inside its process, and its only way to say something to the parent."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_agent.sandbox.frames import FrameKind, encode

if TYPE_CHECKING:
    import torch


class Call:
    """One call of an entry: what it was given, where it may write, and how it answers."""

    def __init__(
        self,
        payload: dict[str, Any],
        tensors: dict[str, torch.Tensor],
        scratch: Path,
        label: str,
        channel: socket.socket,
    ) -> None:
        self.payload = payload
        self.tensors = tensors
        self.scratch = scratch
        self.label = label
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Stream one message to the parent. Raises TypeError for what JSON or the channel cannot carry."""
        self._write(FrameKind.MESSAGE, record, tensors or {})

    def alone(self) -> contextlib.AbstractContextManager[object]:
        """A block in which nothing that shares this process's device may use it: a child has its own say over that."""
        return contextlib.nullcontext()

    def _write(self, kind: FrameKind, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        buffers = encode(kind, record, tensors)
        with self._lock:
            for buffer in buffers:
                self._channel.sendall(buffer)
