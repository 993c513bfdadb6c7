"""Integers are exact at their declared width: they wrap, and unsigned operations read the same bits unsigned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from kernel_agent.ir import execute


@triton.jit
def _arithmetic(A, B, Y, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    a, b = tl.load(A + c), tl.load(B + c)
    tl.store(Y + c, a + b)
    tl.store(Y + BLOCK + c, a * b)
    tl.store(Y + 2 * BLOCK + c, a // b)
    tl.store(Y + 3 * BLOCK + c, a % b)
    tl.store(Y + 4 * BLOCK + c, a >> 3)
    tl.store(Y + 5 * BLOCK + c, (a < b).to(A.dtype.element_ty))
    tl.store(Y + 6 * BLOCK + c, a ^ (b << 2))


def _run(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    def stub(a, b):
        y = torch.empty(7 * a.numel(), dtype=a.dtype, device=a.device)
        _arithmetic[(1,)](a, b, y, a.numel(), BLOCK=a.numel())
        return y

    return execute(stub, (a, b)).result.numpy().reshape(7, -1)


def _truncated(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Division as in C."""
    quotient = np.trunc(a.astype(np.longdouble) / b.astype(np.longdouble)).astype(a.dtype)
    return quotient, a - quotient * b


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64", "uint8", "uint32", "uint64"])
def test_arithmetic_matches_numpy_at_every_width(name):
    kind = np.dtype(name)
    info = np.iinfo(kind)
    rng = np.random.default_rng(0)
    a = rng.integers(info.min, info.max, 32, dtype=kind, endpoint=True)
    b = rng.integers(info.min, info.max, 32, dtype=kind, endpoint=True)
    b[b == 0] = 3
    a[:3], b[:3] = [info.max, info.min, 7], [info.max, 5, 2]
    got = _run(torch.from_numpy(a), torch.from_numpy(b)).view(kind)
    with np.errstate(over="ignore"):
        quotient, remainder = (a // b, a % b) if kind.kind == "u" else _truncated(a, b)
        wanted = [a + b, a * b, quotient, remainder, a >> 3, (a < b).astype(kind), a ^ (b << np.array(2, kind))]
    for operation, ours, theirs in zip(["+", "*", "/", "%", ">>", "<", "^"], got, wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{operation} of {name}")


@pytest.mark.parametrize("name", ["int8", "int16", "int32", "int64"])
def test_the_least_integer_divided_by_minus_one_wraps(name):
    # The processor traps on this division: it would end the process instead of the test.
    dtype = getattr(torch, name)
    least, minus_one = torch.full((32,), torch.iinfo(dtype).min, dtype=dtype), torch.full((32,), -1, dtype=dtype)
    got = _run(least, minus_one)
    assert (got[2] == torch.iinfo(dtype).min).all(), "quotient"
    assert (got[3] == 0).all(), "remainder"


@triton.jit
def _random(Y, BITS, seed, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(BITS + c, tl.randint(seed, c).to(tl.int32, bitcast=True).to(tl.int64))
    tl.store(Y + c, tl.rand(seed, c))


def _philox(seed: int, offset: int) -> int:
    """First word of Philox-4x32-10 (Salmon et al. 2011) as Triton seeds it."""
    mask = 0xFFFFFFFF
    c, k = [offset, 0, 0, 0], [seed & mask, seed >> 32]
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & mask, (low >> 32) ^ c[3] ^ k[1], low & mask]
        k = [(k[0] + 0x9E3779B9) & mask, (k[1] + 0xBB67AE85) & mask]
    return c[0]


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, 123456789012345])
def test_random_numbers_are_those_of_the_device(seed):
    # a dropout mask must be the same in forward and backward, here and on the GPU
    def stub(seed):
        y = torch.empty(64, device="cuda")
        bits = torch.empty(64, dtype=torch.int64, device="cuda")
        _random[(1,)](y, bits, seed, BLOCK=64)
        return y, bits

    y, bits = execute(stub, (seed,)).result
    words = np.array([_philox(seed, k) for k in range(64)], dtype=np.uint32)
    np.testing.assert_array_equal(bits.numpy(), words.view(np.int32).astype(np.int64))
    assert bool(((y >= 0) & (y < 1)).all())
    assert len(set(y.tolist())) == 64


@triton.jit
def _high(A, B, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(Y + c, tl.umulhi(tl.load(A + c), tl.load(B + c)))


@pytest.mark.parametrize("width", [32, 64])
def test_high_half_of_unsigned_products(width):
    def stub(a, b):
        y = torch.empty_like(a)
        _high[(1,)](a, b, y, BLOCK=16)
        return y

    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 2**width - 1, 16, dtype=f"uint{width}", endpoint=True) for _ in range(2))
    got = execute(stub, tuple(torch.from_numpy(t.view(f"int{width}")) for t in (a, b))).result.numpy()
    wanted = [(int(x) * int(y)) >> width for x, y in zip(a, b, strict=True)]
    assert got.view(f"uint{width}").tolist() == wanted


@triton.jit
def _masks(M, X, Y, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    keep = tl.load(M + c)
    tl.store(Y + c, tl.where(keep, tl.load(X + c), 0.0))
    tl.store(M + c, keep == 0)


def test_boolean_masks_in_memory():
    def stub(mask, x):
        y = torch.empty_like(x)
        _masks[(1,)](mask, x, y, BLOCK=8)
        return y

    mask, x = torch.arange(8) % 3 == 0, torch.randn(8)
    execution = execute(stub, (mask, x))
    torch.testing.assert_close(execution.result, torch.where(mask, x, 0.0).double())
    assert execution.mutated == ("mask",)
