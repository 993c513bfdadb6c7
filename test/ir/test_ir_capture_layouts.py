"""Tensors of every layout: shared storage, overlaps, complex numbers, results put into given memory."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from gradient_check import check_gradients
from torch import Tensor

from kernel_agent.ir import CaptureError, declared_dtype, execute


@triton.jit
def _multiply(X, Y, Z, rows, cols, sx, sy, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    product = tl.load(X + r * sx + c, mask=c < cols) * tl.load(Y + r * sy + c, mask=c < cols)
    tl.store(Z + r * cols + c, product, mask=c < cols)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _multiply[(x.shape[0],)](x, y, z, *x.shape, x.stride(0), y.stride(0), BLOCK=16)
    return z


@triton.jit
def _double_in_place(X, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    tl.store(X + c, tl.load(X + c, mask=c < n) * 2, mask=c < n)


def test_q_k_and_v_of_one_tensor_get_their_own_gradients():
    # they share a storage: a recording per storage must not mix the parts
    q, k, v = torch.randn(3, 4, 8).unbind(0)
    check_gradients(lambda q, k, v: multiply(multiply(q, k), v), (q, k, v), lambda q, k, v: q * k * v)


def test_a_leaf_that_the_stub_takes_apart_gets_the_gradients_of_all_parts():
    def stub(qkv: Tensor) -> Tensor:
        q, k, v = qkv.chunk(3, dim=-1)
        return multiply(q, k) + multiply(k, v)

    def reference(qkv: Tensor) -> Tensor:
        q, k, v = qkv.chunk(3, dim=-1)
        return q * k + k * v

    check_gradients(stub, (torch.randn(4, 24),), reference)


def test_one_tensor_given_twice_has_a_gradient_for_each_argument():
    # with one memory for both, the first would get nothing and the second everything
    x = torch.randn(4, 8)
    check_gradients(multiply, (x, x), lambda x, y: x * y)


def test_overlapping_slices_have_gradients_of_their_own():
    x = torch.randn(5, 8)
    check_gradients(multiply, (x[:4], x[1:]), lambda x, y: x * y)


def test_windows_that_share_elements_get_one_gradient_per_window():
    # torch does not say at once that these overlap; copying into them one by one would leave wrong values
    windows = torch.arange(11.0).unfold(0, 8, 1)
    check_gradients(lambda x: multiply(x, x), (windows,), lambda x: x * x)


def test_an_expanded_argument_that_is_no_leaf_keeps_its_stride():
    def stub(x: Tensor, y: Tensor) -> Tensor:
        assert y.stride(0) == 0
        return multiply(x, y)

    y = torch.randn(1, 8).expand(4, 8)
    execution = execute(stub, (x := torch.randn(4, 8), y), {}, leaves=(0,))
    torch.testing.assert_close(execution.result.detach(), x.double() * y.double())


def test_an_expanded_leaf_is_given_to_the_kernel_with_all_its_elements():
    check_gradients(multiply, (torch.randn(4, 8), torch.randn(1, 8).expand(4, 8)), lambda x, y: x * y)


def test_an_argument_changed_in_place_is_an_output():
    def stub(x: Tensor) -> Tensor:
        _double_in_place[(1,)](x, x.numel(), BLOCK=16)
        return x * x

    execution = check_gradients(stub, (torch.randn(9),), lambda x: 4 * x * x)
    assert execution.mutated == ("x",)
    assert execution.arguments["x"].requires_grad


def test_complex_numbers_reach_kernels_as_pairs():
    @triton.jit
    def modulus(Z, OUT, n, BLOCK: tl.constexpr):
        c = tl.arange(0, BLOCK)
        real = tl.load(Z + 2 * c, mask=c < n)
        imaginary = tl.load(Z + 2 * c + 1, mask=c < n)
        tl.store(OUT + c, real * real + imaginary * imaginary, mask=c < n)

    def stub(x: Tensor, turn: Tensor) -> Tensor:
        z = torch.view_as_complex(x.view(-1, 2)) * turn
        assert z.dtype is torch.complex64
        out = torch.empty(z.numel(), device=z.device)
        modulus[(1,)](torch.view_as_real(z), out, z.numel(), BLOCK=16)
        return out

    turn = torch.polar(torch.tensor(3.0), torch.randn(5))
    check_gradients(
        stub,
        (torch.randn(10), turn),
        lambda x, z: (torch.view_as_complex(x.view(-1, 2)) * z.to(torch.complex128)).abs() ** 2,
    )


@pytest.mark.parametrize("turned", [False, True])
def test_a_result_that_is_put_into_given_memory_is_recorded(turned):
    # torch's own out= refuses under autograd
    def stub(x: Tensor, y: Tensor) -> Tensor:
        z = torch.empty(4, 4, device=x.device).t() if turned else torch.empty(4, 4, device=x.device)
        assert torch.mm(x, y, out=z) is z
        return z * 2

    check_gradients(stub, (torch.randn(4, 6), torch.randn(6, 4)), lambda x, y: 2 * x @ y)


def test_numbers_made_between_launches_are_not_rounded_to_float32():
    def stub(x: Tensor) -> list[Tensor]:
        i = torch.arange(1, 4, device=x.device)
        made = [torch.full((3,), 0.1), torch.tensor(0.1), i / 3, i * 0.1, torch.where(i > 1, 0.1, 0.2), i.sqrt()]
        assert all(tensor.dtype is torch.float32 for tensor in made)
        return made

    full, scalar, third, tenth, chosen, root = execute(stub, (torch.zeros(3),)).result
    assert full[0].item() == scalar.item() == tenth[0].item() == chosen[1].item() == 0.1
    assert third[0].item() == 1 / 3
    assert root[1].item() == torch.tensor(2.0, dtype=torch.float64).sqrt().item()


def test_bits_of_floats_read_as_integers_are_refused():
    # an image holds float64: its bits are not those the code would see
    with pytest.raises(CaptureError, match=r"reads memory of torch.float32 as torch.int32"):
        execute(lambda x: x.view(torch.int32) + 1, (torch.randn(4),))


def test_a_workspace_of_bytes_read_as_floats_is_refused_with_what_to_write():
    # it named the dtype that the image is held in, of which the file has nothing
    with pytest.raises(CaptureError, match=r"reads memory of torch.uint8 as torch.float16") as caught:
        execute(lambda x: torch.empty(64, dtype=torch.uint8).view(torch.float16) + x, (torch.randn(32),))
    assert "torch.empty(..., dtype=torch.float16)" in caught.value.remedy


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_floating_dtype_is_reported_and_computed_exactly(dtype):
    x = torch.tensor([[0.5, 2.0, -1.5]]).to(dtype)
    result = execute(multiply, (x, x)).result
    assert declared_dtype(result) is dtype
    assert result.tolist() == [[0.25, 4.0, 2.25]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_every_integer_dtype_is_reported_and_computed_exactly(dtype):
    x = torch.tensor([[1, 2, 11]], dtype=dtype)
    result = execute(multiply, (x, x)).result
    assert result.dtype is dtype
    assert result.tolist() == [[1, 4, 121]]
