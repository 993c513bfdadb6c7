"""Tensor descriptors that pick rows one by one or update memory atomically."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients

from kernel_agent.ir import execute


@triton.jit
def _rows(X, ROWS, Y, M, N, FROM: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [M, N], [N, 1], [1, 16])
    target = tl.make_tensor_descriptor(Y, [M, N], [N, 1], [1, 16])
    rows = tl.load(ROWS + tl.arange(0, 8))
    picked = source.gather(rows, FROM)
    target.scatter(picked * picked, 7 - tl.arange(0, 8), FROM)


@pytest.mark.parametrize("start", [0, 12])
def test_rows_are_gathered_and_scattered_within_bounds(start):
    # row 50 and the columns past the end are outside: they read zero and write nothing
    def stub(x, rows):
        y = torch.zeros(8, x.shape[1], device=x.device)
        _rows[(1,)](x, rows, y, 8, x.shape[1], start)
        return y

    def reference(x, rows):
        inside = [x[int(r)] if r < 8 else torch.zeros_like(x[0]) for r in rows]
        picked = torch.stack(inside).flip(0) ** 2
        columns = torch.arange(x.shape[1])
        return torch.where((columns >= start) & (columns < start + 16), picked, 0.0)

    rows = torch.tensor([3, 0, 50, 3, 7, 1, 2, 6], dtype=torch.int32)
    check_gradients(stub, (torch.randn(8, 20), rows), reference)


@triton.jit
def _updates(X, Y, M, N, KIND: tl.constexpr):
    source = tl.make_tensor_descriptor(X, [M, N], [N, 1], [4, 16])
    target = tl.make_tensor_descriptor(Y, [4, N], [N, 1], [4, 16])
    x = source.load([tl.program_id(0) * 4, 0])
    if KIND == "add":
        target.atomic_add([0, 0], x)
    elif KIND == "max":
        target.atomic_max([0, 0], x)
    elif KIND == "min":
        target.atomic_min([0, 0], x)
    elif KIND == "and":
        target.atomic_and([0, 0], x)
    elif KIND == "or":
        target.atomic_or([0, 0], x)
    else:
        target.atomic_xor([0, 0], x)


def _update_stub(kind):
    def stub(x, y):
        _updates[(3,)](x, y, 12, 16, kind)
        return y

    return stub


def test_descriptors_add_atomically_with_gradients():
    check_gradients(
        _update_stub("add"), (torch.randn(12, 16), torch.randn(4, 16)), lambda x, y: y + x.view(3, 4, 16).sum(0)
    )


@pytest.mark.parametrize(("kind", "reference"), [("max", torch.amax), ("min", torch.amin)])
def test_descriptors_keep_extremes_of_16_bit_floats_with_gradients(kind, reference):
    x, y = torch.randn(12, 16).half(), torch.randn(4, 16).half()
    check_gradients(_update_stub(kind), (x, y), lambda x, y: reference(torch.cat([x, y]).view(4, 4, 16), 0))


@pytest.mark.parametrize("kind", ["add", "max", "min", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_descriptors_update_integers(kind, dtype):
    x = torch.randint(-(2**31), 2**31 - 1, (12, 16), dtype=torch.int64)
    y = torch.randint(-(2**31), 2**31 - 1, (4, 16), dtype=torch.int64)
    if dtype == torch.uint32:
        x, y = x % 2**32, y % 2**32
    wanted = y
    for part in x.view(3, 4, 16):
        wanted = {
            "add": torch.add,
            "max": torch.maximum,
            "min": torch.minimum,
            "and": torch.bitwise_and,
            "or": torch.bitwise_or,
            "xor": torch.bitwise_xor,
        }[kind](wanted, part)
    inputs = (x.to(torch.int32).view(dtype), y.to(torch.int32).view(dtype))
    assert torch.equal(execute(_update_stub(kind), inputs).result.view(torch.int32), wanted.to(torch.int32))
