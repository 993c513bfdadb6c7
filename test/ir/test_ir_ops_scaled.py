"""Products of microscaled formats against tables of the OCP specification, spelt out here."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients

from kernel_agent.ir import execute


@triton.jit
def _scaled(A, SA, B, SB, C, M: tl.constexpr, N: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KS: tl.constexpr,
            FA: tl.constexpr, FB: tl.constexpr):  # fmt: skip
    m, n, s = tl.arange(0, M), tl.arange(0, N), tl.arange(0, KS)
    a = tl.load(A + m[:, None] * KA + tl.arange(0, KA)[None, :])
    b = tl.load(B + tl.arange(0, KB)[:, None] * N + n[None, :])
    sa = tl.load(SA + m[:, None] * KS + s[None, :])
    sb = tl.load(SB + n[:, None] * KS + s[None, :])
    c = tl.dot_scaled(a, sa, FA, b, sb, FB)
    tl.store(C + m[:, None] * N + n[None, :], c)


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
M, N, K = 32, 16, 64


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor([*E2M1, *[-v for v in E2M1]], dtype=torch.float64)[codes.long()]


def _scales(codes: torch.Tensor) -> torch.Tensor:
    return torch.exp2(codes.double() - 127).repeat_interleave(32, 1)


def _stub(a_format, b_format):
    def stub(a, sa, b, sb):
        c = torch.empty(M, N, device=a.device)
        _scaled[(1,)](a, sa, b, sb, c, M, N, a.shape[1], b.shape[0], K // 32, a_format, b_format)
        return c

    return stub


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_with_block_scales_has_exact_values_and_gradients(name, dtype):
    a, b = torch.randn(M, K).to(dtype), torch.randn(K, N).to(dtype)
    sa, sb = torch.randint(120, 134, (M, K // 32)).byte(), torch.randint(120, 134, (N, K // 32)).byte()

    def reference(a, sa, b, sb):
        return (a * _scales(sa)) @ (b * _scales(sb).T)

    check_gradients(_stub(name, name), (a, sa, b, sb), reference)


def test_fp4_packs_two_neighbours_of_k_into_a_byte_the_first_below():
    codes = torch.randint(0, 16, (M, K))
    b = torch.randn(K, N).to(torch.float8_e4m3fn)
    sa, sb = torch.randint(120, 134, (M, K // 32)).byte(), torch.randint(120, 134, (N, K // 32)).byte()
    packed = (codes[:, ::2] | (codes[:, 1::2] << 4)).byte()
    wanted = (_nibbles(codes) * _scales(sa)) @ (b.double() * _scales(sb).T)
    torch.testing.assert_close(execute(_stub("e2m1", "e4m3"), (packed, sa, b, sb)).result, wanted, rtol=1e-14, atol=0)


def test_a_scale_of_255_is_nan():
    a, b = torch.ones(M, K).to(torch.float8_e4m3fn), torch.ones(K, N).to(torch.float8_e4m3fn)
    sa, sb = torch.full((M, K // 32), 127).byte(), torch.full((N, K // 32), 127).byte()
    sa[3, 1] = 255
    result = execute(_stub("e4m3", "e4m3"), (a, sa, b, sb)).result
    assert result[3].isnan().all()
    assert (result[:3] == K).all()


@triton.jit
def _mixed(A, B, SB, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + tl.arange(0, K // 2)[:, None] * N + n[None, :])
    sb = tl.load(SB + n[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :])
    acc = tl.full((M, N), 1.0, tl.float32)
    tl.store(C + m[:, None] * N + n[None, :], tl.dot_scaled(a, None, "bf16", b, sb, "e2m1", acc))


def test_bfloat16_times_fp4_without_a_scale_of_its_own():
    codes = torch.randint(0, 16, (K, N))
    sb = torch.randint(120, 134, (N, K // 32)).byte()

    def stub(a, b, sb):
        c = torch.empty(M, N, device=a.device)
        _mixed[(1,)](a, b, sb, c, M, N, K)
        return c

    def reference(a, b, sb):
        return a @ (_nibbles(codes) * _scales(sb).T) + 1

    packed = (codes[::2] | (codes[1::2] << 4)).byte()
    check_gradients(stub, (torch.randn(M, K).bfloat16(), packed, sb), reference)
