"""Adjoints within the kernels that users write around them: executed, compiled for a GPU, and told apart by Triton."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import triton
from tile_functions import torch_rmsnorm
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernel_agent import outputs
from kernel_agent.ir import IRError

FILE = """\
import torch
import triton
import triton.language as tl

import kernel_agent


@triton.jit
def rmsnorm(x, w, eps):
    rstd = tl.rsqrt(tl.sum(x * x, axis=1) / x.shape[1] + eps)
    return x * rstd[:, None] * w[None, :]


rmsnorm_grad = kernel_agent.grad(rmsnorm, wrt=("x", "w"){shapes})


@triton.jit
def rmsnorm_backward(X, W, DY, DX, DW, rows, eps, BLOCK: tl.constexpr, N: tl.constexpr):
    cols = tl.arange(0, N)
    w = tl.load(W + cols)
    dw_sum = tl.zeros([N], tl.float32)
    for start in range(0, rows, BLOCK):
        offsets = (start + tl.arange(0, BLOCK))[:, None] * N + cols[None, :]
        dx, dw = rmsnorm_grad(tl.load(X + offsets), w, eps, tl.load(DY + offsets))
        tl.store(DX + offsets, dx)
        dw_sum += dw
    tl.store(DW + cols, dw_sum)


def backward(x, w, dy, block=8):
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    rmsnorm_backward[(1,)](x, w, dy, dx, dw, x.shape[0], 1e-5, block, x.shape[1])
    return dx, dw
"""
NAMED = ', shapes="x=[M, N], w=[N], eps=fp32"'
NUMBERS = ', shapes="x=[8, 32], w=[32], eps=fp32"'


def module_of(folder: Path, shapes: str, *changes: tuple[str, str]) -> ModuleType:
    """A user's file, imported, with changes of its text."""
    text = FILE.format(shapes=shapes)
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = folder / f"user_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(path.stem, None)


def case(rows: int, cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, w and a cotangent."""
    generator = torch.Generator().manual_seed(rows)
    return tuple(torch.randn(shape, generator=generator) for shape in ((rows, cols), (cols,), (rows, cols)))


def truth(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    leaves = [tensor.double().requires_grad_() for tensor in (x, w)]
    return torch.autograd.grad(torch_rmsnorm(*leaves, 1e-5)[0], leaves, dy.double())


@pytest.mark.parametrize("shapes", [NAMED, NUMBERS, ""], ids=["named", "numbers", "by_call"])
def test_kernel_around_an_adjoint_computes_gradients(tmp_path: Path, shapes: str) -> None:
    # three blocks of rows: the user's own loop sums what the adjoint gives for w
    given = case(24, 32)
    for mine, theirs in zip(outputs(module_of(tmp_path, shapes).backward, *given), truth(*given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shapes", [NAMED, ""], ids=["named", "by_call"])
def test_kernel_around_an_adjoint_compiles_for_a_gpu(tmp_path: Path, shapes: str) -> None:
    kernel = module_of(tmp_path, shapes).rmsnorm_backward
    types = dict.fromkeys(("X", "W", "DY", "DX", "DW"), "*fp32") | {"rows": "i32", "eps": "fp32"}
    source = ASTSource(kernel, types | {"BLOCK": "constexpr", "N": "constexpr"}, {(7,): 8, (8,): 128})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


def test_adjoint_derived_by_call_serves_several_shapes(tmp_path: Path) -> None:
    # one function, called at two shapes and dtypes: each gets an adjoint of its own, found again at the next call
    module = module_of(tmp_path, "")
    for rows, cols in ((16, 32), (8, 64), (16, 32)):
        x, w, dy = case(rows, cols)
        for mine, theirs in zip(outputs(module.backward, x, w, dy), truth(x, w, dy), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    assert list(module.rmsnorm_grad.sources) == [f"x=[8, {n}] fp32, w=[{n}] fp32, eps=fp32" for n in (32, 64)]


def test_several_results_of_one_expression_take_their_cotangents_as_a_tuple(tmp_path: Path) -> None:
    # `return both(...)` does not say that it returns two: their cotangents come as one argument then
    module = module_of(
        tmp_path,
        "",
        ("@triton.jit\ndef rmsnorm(", "@triton.jit\ndef both(y):\n    return y, y * 2\n\n\n@triton.jit\ndef rmsnorm("),
        ("return x * rstd[:, None] * w[None, :]", "return both(x * rstd[:, None] * w[None, :])"),
        ("eps, tl.load(DY + offsets)", "eps, (tl.load(DY + offsets), tl.load(DY + offsets))"),
    )
    given = case(8, 32)
    for mine, theirs in zip(outputs(module.backward, *given), truth(*given), strict=True):
        torch.testing.assert_close(mine, 3 * theirs, rtol=1e-6, atol=1e-6)


def test_results_that_are_no_floats_need_shapes(tmp_path: Path) -> None:
    # how many cotangents there are is not seen from the text then: a shifted one would go to another result
    changes = ("return x * rstd", "return tl.argmax(x, 1), x * rstd"), ("eps, tl.load(DY", "eps, 0.0, tl.load(DY")
    with pytest.raises(IRError, match="2 values, not all of them floats"):
        outputs(module_of(tmp_path, "", *changes).backward, *case(8, 32))


@pytest.mark.parametrize(
    ("rows", "shapes", "message"),
    [(16, NUMBERS, r"x must be \[8, 32\] fp32"), (1, NAMED, "M must be 2 to 4096")],
)
def test_call_at_a_shape_that_was_not_assumed_does_not_compile(
    tmp_path: Path, rows: int, shapes: str, message: str
) -> None:
    # without the assertion an adjoint of another broadcast would run and be wrong
    with pytest.raises(IRError, match=message):
        outputs(module_of(tmp_path, shapes).backward, *case(rows, 32), rows)


def test_cotangent_of_another_shape_does_not_compile(tmp_path: Path) -> None:
    module = module_of(tmp_path, NUMBERS, ("tl.load(DY + offsets))", "tl.load(DY + cols))"))
    with pytest.raises(IRError, match=r"d_out must be \[8, 32\]"):
        outputs(module.backward, *case(8, 32))


@pytest.mark.parametrize("shapes", [NUMBERS, ""], ids=["numbers", "by_call"])
def test_kernel_has_another_key_when_the_function_changes(tmp_path: Path, shapes: str) -> None:
    # Triton keeps compiled kernels by this key: an equal one would run the adjoint of the older function
    key = module_of(tmp_path, shapes).rmsnorm_backward.cache_key
    assert key == module_of(tmp_path, shapes).rmsnorm_backward.cache_key
    assert key != module_of(tmp_path, shapes, ("return x *", "return 2 * x *")).rmsnorm_backward.cache_key
