"""Random numbers from seeds, and arithmetic on integers and their bits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from corpus.case import Case, in_dtypes
from corpus.philox import normal_pair, philox, uniform

LOW = 0xFFFFFFFF


@triton.jit
def _noise(X, Y, SEED, n, sigma, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    seed = tl.load(SEED)
    x = tl.load(X + o, mask=o < n, other=0.0)
    noise = tl.randn(seed, o)
    scale = 1.0 + tl.rand(seed + 1, o)
    tl.store(Y + o, x * scale + sigma * x * x * noise, mask=o < n)


def noise(x: Tensor, seed: Tensor) -> Tensor:
    """The seed is read from memory and is wider than 32 bits."""
    y = torch.empty_like(x)
    _noise[(triton.cdiv(x.numel(), 32),)](x, y, seed, x.numel(), 0.5, BLOCK=32)
    return y


def _noise_reference(x: Tensor, seed: Tensor) -> Tensor:
    index = torch.arange(x.numel())
    words = philox(int(seed), index)
    scale = 1 + uniform(philox(int(seed) + 1, index)[0])
    return x * scale + 0.5 * x * x * normal_pair(words[0], words[1])[0]


@triton.jit
def _draws(OUT, FOUR, seed, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(OUT + o, tl.randint(seed, o))
    a, b, c, d = tl.randint4x(seed, o, n_rounds=10)
    at = FOUR + o * 4
    tl.store(at, a)
    tl.store(at + 1, b)
    tl.store(at + 2, c)
    tl.store(at + 3, d)


def draws(seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Words as int32."""
    one = torch.empty(n, dtype=torch.int32, device="cuda")
    four = torch.empty((n, 4), dtype=torch.int32, device="cuda")
    _draws[(n // 16,)](one, four, seed, BLOCK=16)
    return one, four


def _draws_reference(seed: int, n: int) -> tuple[Tensor, Tensor]:
    words = [_signed(word) for word in philox(seed, torch.arange(n))]
    return words[0], torch.stack(words, 1)


def _signed(word: Tensor) -> Tensor:
    return torch.where(word >= 1 << 31, word - (1 << 32), word)


@triton.jit
def _stochastic(X, Y, n, seed, step, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    u0, u1, u2, u3 = tl.rand4x(seed, o)
    scaled = x / step
    low = tl.floor(scaled)
    rounded = low + tl.where(scaled - low > u2, 1.0, 0.0)
    # straight through: the rounding has no slope, the residual keeps x in the graph
    tl.store(Y + o, rounded * step + x * (u0 + u1 - u3), mask=o < n)


def stochastic_rounding(x: Tensor, seed: int) -> Tensor:
    y = torch.empty_like(x)
    _stochastic[(triton.cdiv(x.numel(), 16),)](x, y, x.numel(), seed, 0.25, BLOCK=16)
    return y


def _stochastic_reference(x: Tensor, seed: int) -> Tensor:
    u = [uniform(word) for word in philox(seed, torch.arange(x.numel()))]
    low = (x / 0.25).floor()
    return (low + (x / 0.25 - low > u[2])) * 0.25 + x * (u[0] + u[1] - u[3])


@triton.jit
def _mix(h):
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    return h


@triton.jit
def _hashed_embedding(TABLE, KEYS, OUT, BUCKETS, HASHES: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0)
    key = tl.load(KEYS + row).to(tl.uint32)
    d = tl.arange(0, D)
    acc = tl.zeros((D,), tl.float32)
    for _ in tl.static_range(HASHES):
        h = _mix(key)
        key += 0x9E3779B9
        sign = tl.where((h >> 31) != 0, -1.0, 1.0)
        bucket = (h % BUCKETS.to(tl.uint32)).to(tl.int32)
        acc += sign * tl.load(TABLE + bucket * D + d)
    tl.store(OUT + row * D + d, acc)


def hashed_embedding(table: Tensor, keys: Tensor) -> Tensor:
    out = torch.empty((keys.numel(), table.shape[1]), dtype=table.dtype, device=table.device)
    _hashed_embedding[(keys.numel(),)](table, keys, out, table.shape[0], HASHES=3, D=table.shape[1])
    return out


def _hashed_reference(table: Tensor, keys: Tensor) -> Tensor:
    rows = []
    for key in keys.tolist():
        acc = torch.zeros(table.shape[1], dtype=table.dtype)
        for k in range(3):
            h = (key + k * 0x9E3779B9) & LOW
            h = (h ^ h >> 16) * 0x85EBCA6B & LOW
            h = (h ^ h >> 13) * 0xC2B2AE35 & LOW
            h ^= h >> 16
            acc = acc + (-1.0 if h >> 31 else 1.0) * table[h % table.shape[0]]
        rows.append(acc)
    return torch.stack(rows)


@triton.jit
def _pack4(X, PACKED, SCALE, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0)
    scale = tl.max(tl.abs(x), 0) / 7.0
    tl.store(SCALE + row, scale)
    q = (tl.floor(x / scale + 0.5)).to(tl.int32) & 0xF
    low, high = tl.split(tl.reshape(q, (BLOCK // 2, 2)))
    half = tl.arange(0, BLOCK // 2)
    tl.store(PACKED + row * (N // 2) + half, (low | (high << 4)).to(tl.uint8), mask=half < N // 2)


@triton.jit
def _unpack4(PACKED, SCALE, W, Y, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    byte = tl.load(PACKED + row * (N // 2) + c // 2, mask=c < N, other=0).to(tl.int32)
    nibble = (byte >> ((c % 2) * 4)) & 0xF
    # four bits, sign extended
    q = (nibble << 28) >> 28
    w = tl.load(W + c, mask=c < N, other=0.0)
    tl.store(Y + row * N + c, q * tl.load(SCALE + row) * w, mask=c < N)


def int4_round_trip(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    rows, N = x.shape
    packed = torch.empty((rows, N // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    _pack4[(rows,)](x, packed, scale, N, BLOCK=32)
    y = torch.empty_like(x)
    _unpack4[(rows,)](packed, scale, w, y, N, BLOCK=32)
    return y, packed


def _int4_reference(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1, keepdim=True) / 7
    q = (x / scale + 0.5).floor().detach()
    nibbles = q.long() & 0xF
    return q * scale * w, nibbles[:, ::2] | nibbles[:, 1::2] << 4


@triton.jit
def _integers(A, B, OUT, n, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    a = tl.load(A + o, mask=o < n, other=0)
    b = tl.load(B + o, mask=o < n, other=1)
    ua, ub = a.to(tl.uint32, bitcast=True), b.to(tl.uint32, bitcast=True)
    shift = b & 31
    tl.store(OUT + 0 * n + o, a // b, mask=o < n)
    tl.store(OUT + 1 * n + o, a % b, mask=o < n)
    tl.store(OUT + 2 * n + o, (ua // ub).to(tl.int32, bitcast=True), mask=o < n)
    tl.store(OUT + 3 * n + o, (ua % ub).to(tl.int32, bitcast=True), mask=o < n)
    tl.store(OUT + 4 * n + o, a * b, mask=o < n)
    tl.store(OUT + 5 * n + o, tl.umulhi(ua, ub).to(tl.int32, bitcast=True), mask=o < n)
    tl.store(OUT + 6 * n + o, a >> shift, mask=o < n)
    tl.store(OUT + 7 * n + o, (ua >> shift.to(tl.uint32)).to(tl.int32, bitcast=True), mask=o < n)
    tl.store(OUT + 8 * n + o, (a << shift) ^ ~b, mask=o < n)
    tl.store(OUT + 9 * n + o, tl.where(ua < ub, tl.minimum(a, b), tl.maximum(a, b)), mask=o < n)
    tl.store(OUT + 10 * n + o, a.to(tl.int8).to(tl.int32) + b.to(tl.int16).to(tl.int32), mask=o < n)


def integers(a: Tensor, b: Tensor) -> Tensor:
    out = torch.empty((11, a.numel()), dtype=torch.int32, device=a.device)
    _integers[(1,)](a, b, out, a.numel(), BLOCK=64)
    return out


def _integers_reference(a: Tensor, b: Tensor) -> Tensor:
    columns = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        ux, uy, shift = x & LOW, y & LOW, y & 31
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        columns.append(
            [
                quotient,
                x - quotient * y,
                ux // uy,
                ux % uy,
                x * y,
                ux * uy >> 32,
                x >> shift,
                ux >> shift,
                (x << shift) ^ ~y,
                min(x, y) if ux < uy else max(x, y),
                _wrap(x, 8) + _wrap(y, 16),
            ]
        )
    return torch.tensor([[_wrap(value, 32) for value in column] for column in columns]).t()


def _wrap(value: int, bits: int) -> int:
    half = 1 << bits - 1
    return (value + half) % (1 << bits) - half


@triton.jit
def _fp8_scaled(X, Y, SCALE, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0), 1.0) / 448.0
    tl.store(SCALE + row, scale)
    tl.store(Y + row * N + c, (x / scale).to(Y.dtype.element_ty), mask=c < N)


@triton.jit
def _fp8_back(Y, SCALE, Z, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    y = tl.load(Y + row * N + c, mask=c < N, other=0.0).to(tl.float32)
    tl.store(Z + row * N + c, y * y * tl.load(SCALE + row), mask=c < N)


def fp8_round_trip(x: Tensor) -> tuple[Tensor, Tensor]:
    """Exact execution rounds nothing, so the value survives its eight bits."""
    y = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _fp8_scaled[(x.shape[0],)](x, y, scale, x.shape[1], BLOCK=32)
    z = torch.empty_like(x)
    _fp8_back[(x.shape[0],)](y, scale, z, x.shape[1], BLOCK=32)
    return z, scale


def _fp8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(1).clamp(min=1) / 448
    return x * x / scale[:, None], scale


@triton.jit
def _int8_quantize(X, Q, SCALE, N, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    x = tl.load(X + row * N + c, mask=c < N, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(x), 0) / 127.0
    tl.store(SCALE + row, scale)
    scaled = x / scale
    # half away from zero: a cast to an integer drops the fraction
    tl.store(Q + row * N + c, (scaled + tl.where(scaled < 0, -0.5, 0.5)).to(tl.int8), mask=c < N)


def int8_quantize(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _int8_quantize[(x.shape[0],)](x, q, scale, x.shape[1], BLOCK=32)
    return q, scale, q.to(torch.float32) * scale[:, None]


def _int8_reference(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = x.abs().amax(1) / 127
    scaled = (x / scale[:, None]).detach()
    q = (scaled + 0.5 * scaled.sign()).trunc()
    return q.to(torch.int8), scale, q * scale[:, None]


@triton.jit
def _negate_by_bits(X, Y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + o, mask=o < n, other=0.0)
    bits = x.to(tl.int32, bitcast=True)
    negative = bits < 0
    exponent = ((bits >> 23) & 0xFF) - 127
    tl.store(Y + o, tl.where(negative, x * x, x) * exponent, mask=o < n)


def exponent_of(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    _negate_by_bits[(triton.cdiv(x.numel(), 32),)](x, y, x.numel(), BLOCK=32)
    return y


def _integer_args() -> tuple[Tensor, Tensor]:
    a = torch.randint(-(2**31), 2**31, (60,)).to(torch.int32)
    b = torch.randint(-(2**31), 2**31, (60,)).to(torch.int32)
    b[:30] = b[:30] % 13 - 6
    b[b == 0] = 7
    return a, b


CASES = [
    Case(
        "noise_rand_randn",
        noise,
        lambda: (torch.randn(70), torch.tensor(2**40 + 12345)),
        _noise_reference,
        literal="2**-31 and 2 pi of tl.rand and tl.randn",
    ),
    Case("randint_words", draws, lambda: (987654321, 64), _draws_reference),
    Case(
        "stochastic_rounding",
        stochastic_rounding,
        lambda: (torch.randn(50), 42),
        _stochastic_reference,
        literal="2**-31 of tl.rand4x",
    ),
    *in_dtypes(
        Case(
            "hashed_embedding",
            hashed_embedding,
            lambda: (torch.randn(13, 8), torch.randint(0, 2**31, (9,)).to(torch.int32)),
            _hashed_reference,
        ),
        torch.bfloat16,
    ),
    Case("int4_pack_unpack", int4_round_trip, lambda: (torch.randn(4, 22), torch.randn(22)), _int4_reference),
    Case("integer_semantics", integers, _integer_args, _integers_reference),
    Case("fp8_round_trip", fp8_round_trip, lambda: (torch.randn(4, 30) * 3,), _fp8_reference),
    Case("int8_quantize", int8_quantize, lambda: (torch.randn(4, 30),), _int8_reference),
    Case(
        "float_bits",
        exponent_of,
        lambda: (torch.randn(50) * 10,),
        lambda x: torch.where(x < 0, x * x, x) * x.detach().abs().log2().floor(),
    ),
]
