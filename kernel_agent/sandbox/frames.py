"""The wire format between parent and child: length-prefixed frames of one JSON record and raw tensor bytes.

    frame  = magic (4 bytes) | kind (u8) | length of JSON (u32) | length of data (u64) | JSON | data      (big endian)
    JSON   = {"record": {...}, "tensors": [{"name", "dtype", "shape", "stride", "nbytes"}, ...]}
    data   = for every tensor the memory it spans, from its first to its last element

Nothing here can execute code, and a reader allocates only what its `Budget` allows: a hostile child can lie in every
field. torch is imported with the first tensor, so that the server can start while its parent still imports.
"""

from __future__ import annotations

import enum
import functools
import json
import math
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

if TYPE_CHECKING:
    import torch

_HEADER = struct.Struct(">4sBIQ")
_MAGIC = b"KAF1"
_RECORD_LIMIT = 16 << 20
_RECEIVES_PER_PUMP = 64

_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


@functools.cache
def dtypes() -> Mapping[str, torch.dtype]:
    """What can be sent, by name."""
    import torch

    return {name: getattr(torch, name) for name in _DTYPES}


@functools.cache
def _names() -> Mapping[torch.dtype, str]:
    return {dtype: name for name, dtype in dtypes().items()}


class ProtocolError(Exception):
    """The other side sent something that is no frame, or more than it may."""


class FrameKind(enum.IntEnum):
    """What a frame means."""

    HELLO = 1
    JOB = 2
    MESSAGE = 3
    FINISHED = 4
    RAISED = 5


@dataclass(frozen=True)
class Frame:
    """One received frame."""

    kind: FrameKind
    record: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@dataclass
class Budget:
    """What a reader still accepts; shrinks with every frame."""

    output_bytes: int
    """Tensor bytes, counted as if contiguous and as sent, whichever is more."""
    record_bytes: int
    """JSON bytes."""


class _TensorHead(BaseModel):
    """Describes one tensor of a frame."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(max_length=1024)
    dtype: str = Field(max_length=32)
    shape: list[int] = Field(max_length=32)
    stride: list[int] = Field(max_length=32)
    nbytes: int = Field(ge=0)

    def span(self) -> int:
        """Elements between the first and the last one, both included. Raises ProtocolError for impossible geometry."""
        if self.dtype not in _DTYPES:
            raise ProtocolError(f"tensor {self.name!r} has the unknown dtype {self.dtype!r}")
        if len(self.shape) != len(self.stride) or any(not 0 <= n < 1 << 62 for n in (*self.shape, *self.stride)):
            raise ProtocolError(f"tensor {self.name!r} has an impossible shape or stride")
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))

    def logical_bytes(self) -> int:
        """Bytes of a contiguous copy."""
        elements = math.prod(self.shape)
        return elements * int(dtypes()[self.dtype].itemsize)


class _FrameHead(BaseModel):
    """The JSON part of a frame."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    record: dict[str, Any]
    tensors: list[_TensorHead] = Field(max_length=4096)


def encode(kind: FrameKind, record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """The buffers of one frame, in order. Raises TypeError for what JSON or the wire cannot carry."""
    heads, data = [], []
    for name, tensor in tensors.items():
        flat = _memory_of(name, tensor)
        nbytes = flat.numel()
        heads.append(
            {
                "name": name,
                "dtype": _names()[tensor.dtype],
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "nbytes": nbytes,
            }
        )
        if nbytes:
            data.append(memoryview(flat.numpy()))
    text = json.dumps({"record": dict(record), "tensors": heads}).encode()
    if len(text) > _RECORD_LIMIT:
        raise TypeError(f"a record of {len(text)} bytes is too long for one message; send large data as tensors")
    head = _HEADER.pack(_MAGIC, kind, len(text), sum(part.nbytes for part in data))
    return [memoryview(head + text), *data]


def _memory_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The bytes a tensor spans, as a flat uint8 tensor on the CPU."""
    import torch

    if tensor.layout != torch.strided or tensor.dtype not in _names():
        raise TypeError(
            f"tensor {name!r} ({tensor.layout}, {tensor.dtype}) cannot be sent; only dense tensors of common dtypes can"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.stride() != tensor.stride():
        raise TypeError(f"tensor {name!r} is a lazy conjugate or negative view; send a resolved copy")
    if plain.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    span = 1 + sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
    return plain.as_strided((span,), (1,)).cpu().view(torch.uint8)


class FrameReader:
    """Assembles frames from a socket, blocking or not, without ever trusting a length."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._ended = False
        self._start_frame()

    @property
    def ended(self) -> bool:
        """True once the other side has closed, be it in the middle of a frame."""
        return self._ended

    def pump(self, channel: socket.socket) -> Iterable[Frame]:
        """Receive what is there (a bounded amount) and yield the frames completed by it. Raises ProtocolError."""
        for _ in range(_RECEIVES_PER_PUMP):
            try:
                count = channel.recv_into(self._wanted[self._filled :])
            except BlockingIOError:
                return
            except ConnectionResetError:
                count = 0
            if count == 0:
                self._ended = True
                return
            self._filled += count
            while self._filled == len(self._wanted):
                frame = self._advance()
                if frame is not None:
                    yield frame

    def receive(self, channel: socket.socket) -> Frame:
        """Wait on a blocking socket for one frame. Raises EOFError when the other side closes first."""
        while not self._ended:
            for frame in self.pump(channel):
                return frame
        raise EOFError("the channel closed before a frame came")

    def _start_frame(self) -> None:
        self._data_length: int | None = None
        self._head: _FrameHead | None = None
        self._memory: list[torch.Tensor] = []
        self._want(memoryview(bytearray(_HEADER.size)))

    def _want(self, buffer: memoryview) -> None:
        self._wanted, self._filled = buffer, 0

    def _advance(self) -> Frame | None:
        """The wanted buffer is full: interpret it and ask for the next one, or hand out a finished frame."""
        if self._data_length is None:
            self._read_header(bytes(self._wanted))
            return None
        if self._head is None:
            self._read_head(bytes(self._wanted))
        for memory in self._memory_left():
            self._want(memory)
            return None
        assert self._head is not None
        tensors = {
            head.name: _rebuild(head, memory) for head, memory in zip(self._head.tensors, self._memory, strict=True)
        }
        frame = Frame(self._kind, self._head.record, tensors)
        self._start_frame()
        return frame

    def _read_header(self, header: bytes) -> None:
        magic, kind, text_length, data_length = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise ProtocolError("the child wrote bytes to the private channel that are no frame")
        try:
            self._kind = FrameKind(kind)
        except ValueError:
            raise ProtocolError(f"the child sent a frame of the unknown kind {kind}") from None
        self._budget.record_bytes -= text_length
        if text_length == 0 or text_length > _RECORD_LIMIT or self._budget.record_bytes < 0:
            raise ProtocolError(f"the child sent a record of {text_length} bytes, more than it may")
        if data_length > self._budget.output_bytes:
            raise ProtocolError(f"the child announced {data_length} bytes of tensors, more than it may send")
        self._data_length = data_length
        self._want(memoryview(bytearray(text_length)))

    def _read_head(self, text: bytes) -> None:
        try:
            head = _FrameHead.model_validate(json.loads(text, parse_int=_short_int))
        except (ValueError, RecursionError, ValidationError):
            raise ProtocolError("the child sent a record that is not the expected JSON") from None
        if len({tensor.name for tensor in head.tensors}) != len(head.tensors):
            raise ProtocolError("the child sent two tensors of one name")
        for tensor in head.tensors:
            if tensor.nbytes != tensor.span() * dtypes()[tensor.dtype].itemsize:
                raise ProtocolError(f"tensor {tensor.name!r} does not span the bytes it announces")
        if sum(tensor.nbytes for tensor in head.tensors) != self._data_length:
            raise ProtocolError("the child announced another amount of tensor bytes than its tensors span")
        self._budget.output_bytes -= sum(max(tensor.nbytes, tensor.logical_bytes()) for tensor in head.tensors)
        if self._budget.output_bytes < 0:
            raise ProtocolError("the child sent more tensor bytes than it may")
        self._head = head
        self._memory = [_unfilled(tensor.nbytes) for tensor in head.tensors]
        self._unfilled = [memoryview(memory.numpy()) for memory in self._memory if memory.numel()]

    def _memory_left(self) -> Iterable[memoryview]:
        while self._unfilled:
            yield self._unfilled.pop(0)


def _short_int(digits: str) -> int:
    """Conversion of long decimal strings is quadratic; no honest record has them."""
    if len(digits) > 40:
        raise ValueError("integer with too many digits")
    return int(digits)


def _unfilled(nbytes: int) -> torch.Tensor:
    """Bytes whose pages are not touched: a child that announces much and sends little costs little."""
    import torch

    return torch.empty(nbytes, dtype=torch.uint8)


def _rebuild(head: _TensorHead, memory: torch.Tensor) -> torch.Tensor:
    dtype = dtypes()[head.dtype]
    # A bool byte other than 0 and 1 is undefined behaviour in torch's kernels.
    flat = memory.ne(0) if head.dtype == "bool" else memory.view(dtype)
    return flat.as_strided(head.shape, head.stride)
