"""The private channel: tensors arrive as they were sent, and no lie of a child hurts the reader."""

from __future__ import annotations

import json
import socket
import struct

import pytest
import torch
from sandbox_jobs import Run, job

from kernel_agent.sandbox import Ending, Limits, Sandbox
from kernel_agent.sandbox.frames import Budget, FrameKind, FrameReader, ProtocolError, dtypes, encode

LAYOUTS = {
    "contiguous": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(24.0)[::2],
    "offset": torch.arange(24.0)[5:9],
    "expanded": torch.arange(3.0)[:, None].expand(3, 5),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "one element with an odd stride": torch.empty(7).as_strided((1, 1), (5, 3)).fill_(1.0),
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_keeps_shape_and_strides_both_ways(sandbox: Sandbox, layout: str) -> None:
    sent = LAYOUTS[layout]
    got = sandbox.run(job("echo", tensors={"x": sent})).messages[0].tensors["x"]
    assert got.shape == sent.shape
    assert got.stride() == sent.stride()
    assert torch.equal(got, sent)


def test_every_dtype_travels(sandbox: Sandbox) -> None:
    sent = {name: torch.tensor([0.0, 1.0, 2.0, 1.0]).to(dtype) for name, dtype in dtypes().items()}
    got = sandbox.run(job("echo", tensors=sent)).messages[0].tensors
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name].view(torch.uint8), tensor.view(torch.uint8)), name


def test_infinities_and_payload_bits_of_nan_travel(sandbox: Sandbox) -> None:
    sent = torch.tensor([0x7FC01234, 0x7F800000, -0x800000], dtype=torch.int32).view(torch.float32)
    got = sandbox.run(job("echo", tensors={"x": sent})).messages[0].tensors["x"]
    assert torch.equal(got.view(torch.int32), sent.view(torch.int32))


def test_large_tensors_flow_both_ways_at_once(sandbox: Sandbox) -> None:
    # Catches a parent that writes all before it reads: both sides would block on full socket buffers.
    sent = {str(number): torch.randn(1 << 22) for number in range(4)}
    got = sandbox.run(job("echo", tensors=sent)).messages[0].tensors
    assert all(torch.equal(got[name], sent[name]) for name in sent)


def test_messages_stream_in_order(sandbox: Sandbox) -> None:
    seen: list[int] = []
    report = sandbox.run(job("count", n=200), lambda message: seen.append(message.record["number"]))
    assert seen == list(range(200))
    assert [message.record["number"] for message in report.messages] == seen


def test_json_travels_unchanged(sandbox: Sandbox) -> None:
    payload = {"nested": [{"a": None, "b": True}], "text": 'ümläut \u0000 "quoted"', "float": 1e-300, "big": 2**63}
    report = sandbox.run(job("echo", **payload))
    assert report.messages[0].record == {"payload": payload, "label": "echo"}


def test_a_sparse_tensor_is_refused_before_anything_starts(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError, match="'x'"):
        sandbox.run(job("echo", tensors={"x": torch.eye(3).to_sparse()}))


def test_a_record_that_is_no_json_is_refused_before_anything_starts(sandbox: Sandbox) -> None:
    with pytest.raises(TypeError):
        sandbox.run(job("echo", value=object()))


def frame(text: bytes, data: bytes = b"", kind: int = 3, magic: bytes = b"KAF1", announced: int | None = None) -> bytes:
    """A frame written by hand, with lies where asked."""
    return struct.pack(">4sBIQ", magic, kind, len(text), len(data) if announced is None else announced) + text + data


def one_tensor(**lies: object) -> bytes:
    """The JSON of a frame with one tensor of two float32, and lies."""
    head = {"name": "x", "dtype": "float32", "shape": [2], "stride": [1], "nbytes": 8, **lies}
    return json.dumps({"record": {}, "tensors": [head]}).encode()


MALFORMED = {
    "no frame at all": b"Traceback (most recent call last)\n",
    "unknown kind": frame(b'{"record": {}, "tensors": []}', kind=9),
    "no JSON": frame(b"\x80\x04\x95pickle"),
    "JSON of another shape": frame(b"[1, 2, 3]"),
    "extra fields": frame(b'{"record": {}, "tensors": [], "more": 1}'),
    "deep nesting": frame(b'{"record": {"a": ' + b"[" * 100_000 + b"]" * 100_000 + b'}, "tensors": []}'),
    "endless integer": frame(b'{"record": {"a": ' + b"9" * 1_000_000 + b'}, "tensors": []}'),
    "huge record announced": struct.pack(">4sBIQ", b"KAF1", 3, 2**32 - 1, 0),
    "huge data announced": frame(b"{}", announced=2**63),
    "unknown dtype": frame(one_tensor(dtype="object"), b"0" * 8),
    "attribute of torch as dtype": frame(one_tensor(dtype="load"), b"0" * 8),
    "negative size": frame(one_tensor(shape=[-2]), b"0" * 8),
    "negative stride": frame(one_tensor(stride=[-1]), b"0" * 8),
    "stride past the data": frame(one_tensor(stride=[1 << 40]), b"0" * 8),
    "sizes that overflow": frame(one_tensor(shape=[1 << 61, 1 << 61], stride=[0, 0], nbytes=4), b"0" * 4),
    "expanded to a giant": frame(one_tensor(shape=[1 << 40], stride=[0], nbytes=4), b"0" * 4),
    "float size": frame(one_tensor(shape=[2.0]), b"0" * 8),
    "less data than tensors": frame(one_tensor(), b"0" * 4),
    "two of one name": frame(
        json.dumps({"record": {}, "tensors": [json.loads(one_tensor())["tensors"][0]] * 2}).encode(), b"0" * 16
    ),
}


def read(data: bytes, budget: Budget | None = None) -> list[object]:
    """All frames in `data`, by way of a real socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader, frames, left = FrameReader(budget or Budget(1 << 20, 4 << 20)), [], memoryview(data)
        theirs.setblocking(False)
        while left:
            left = left[theirs.send(left[: 64 << 10]) :]
            frames += reader.pump(ours)
        return frames


@pytest.mark.parametrize("lie", MALFORMED)
def test_a_malformed_frame_is_a_protocol_error(lie: str) -> None:
    with pytest.raises(ProtocolError):
        read(MALFORMED[lie])


def test_a_frame_may_arrive_byte_by_byte() -> None:
    data = b"".join(bytes(part) for part in encode(FrameKind.MESSAGE, {"a": 1}, {"x": torch.arange(5)}))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        reader, frames = FrameReader(Budget(1 << 20, 1 << 20)), []
        for position in range(len(data)):
            theirs.send(data[position : position + 1])
            frames += reader.pump(ours)
    assert len(frames) == 1
    assert torch.equal(frames[0].tensors["x"], torch.arange(5))


def test_a_budget_counts_over_all_frames() -> None:
    data = b"".join(bytes(part) for part in encode(FrameKind.MESSAGE, {}, {"x": torch.zeros(100)}))
    assert len(read(data * 2, Budget(800, 1 << 20))) == 2
    with pytest.raises(ProtocolError):
        read(data * 3, Budget(800, 1 << 20))


def test_bool_bytes_other_than_zero_and_one_are_made_true() -> None:
    # torch's kernels are undefined on such bytes: two "true" values could compare unequal.
    frames = read(frame(one_tensor(dtype="bool", nbytes=2), b"\x02\xff"))
    assert frames[0].tensors["x"].view(torch.uint8).tolist() == [1, 1]


@pytest.mark.parametrize("lie", ["no frame at all", "no JSON", "huge record announced", "expanded to a giant"])
def test_a_child_that_writes_malformed_frames_ends_at_once(run: Run, lie: str) -> None:
    # The child sleeps for ten minutes after its lie: the parent must not wait for it.
    report = run("raw_bytes", hex=MALFORMED[lie].hex())
    assert report.ending is Ending.PROTOCOL
    assert report.message


@pytest.mark.parametrize("kind", [1, 2, 4, 5])
def test_a_frame_out_of_turn_is_no_success(run: Run, kind: int) -> None:
    # A second HELLO, a JOB, a FINISHED before the end and then silence, a RAISED that is not one.
    report = run("raw_bytes", Limits(wall_s=1), hex=frame(b'{"record": {}, "tensors": []}', kind=kind).hex())
    assert report.ending is (Ending.TIMED_OUT if kind == 4 else Ending.PROTOCOL)


def test_a_flood_of_messages_ends_at_its_budget(run: Run) -> None:
    report = run("endless_messages", Limits(wall_s=30, output_bytes=32 << 20))
    assert report.ending is Ending.PROTOCOL
    assert len(report.messages) == 8


def test_an_expanded_giant_counts_with_its_full_size(run: Run) -> None:
    # It is four bytes on the wire, and four terabytes as soon as the parent computes with it.
    assert run("expanded_giant").ending is Ending.PROTOCOL


def test_stopping_in_the_middle_of_a_frame_does_not_change_the_ending(run: Run) -> None:
    assert run("stop_in_a_frame").ending is not Ending.RAISED
