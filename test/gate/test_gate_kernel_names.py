"""Triton calls what a kernel names while it compiles: which names are let through."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_agent.gate.kernel_names import refuse_foreign_names
from kernel_agent.ir import import_module
from kernel_agent.ir.recorded.forms import CannotRecord

HEAD = """
import math
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.cache import os, get_cache_manager

load = torch.load
language = tl.core
SIZE: tl.constexpr = 4
HALF = tl.float16


@triton.jit
def helper(x):
    return x


@triton.jit
def kernel(X, SIZES: tl.constexpr):
    x = tl.load(X)
"""


def looked_at(tmp_path: Path, body: str) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(f"{HEAD}    {body}\n")
    refuse_foreign_names(path.read_text(), import_module(path, "kernels_of_a_test"), 0)


@pytest.mark.parametrize(
    "body",
    [
        "os.system('true')",
        "tl.core.builtins.exec('1')",
        "triton.runtime.cache.os.system('true')",
        "load = 1 if SIZES else 2\n    os = 3\n    os.system('true')",
        "if SIZES:\n        getattr = 1\n    getattr(tl, 'core')",
        "x.__class__",
        "tl.load._fn",
        "__builtins__",
        "import os",
        "torch.load('x')",
        "m = triton.runtime",
        "m: tl.constexpr = tl.core.builtins\n    m.exec('1')",
        "m: tl.constexpr = tl.core\n    m.builtins.exec('1')",
        "tl.static_print(tl)",
        "if SIZES:\n        math = 1\n    m: tl.constexpr = math",
    ],
)
def test_a_kernel_that_names_more_than_the_language_is_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(CannotRecord):
        looked_at(tmp_path, body)


def test_a_name_that_leads_to_a_function_is_taken_away(tmp_path: Path) -> None:
    # A kernel that also binds the name itself, on a path that is not taken, would call torch.load while it compiles.
    path = tmp_path / "kernels.py"
    path.write_text(f"{HEAD}    if SIZES:\n        load = helper\n    load('x')\n")
    module = import_module(path, "kernels_of_a_test")
    refuse_foreign_names(path.read_text(), module, 0)
    assert not hasattr(module, "load")
    assert not hasattr(module, "get_cache_manager")


@pytest.mark.parametrize(
    "body",
    [
        "tl.store(X, libdevice.erf(helper(x)).to(HALF) * SIZE + math.pi)",
        "forward = tl.sum(x, 0)\n    tl.store(X, forward.to(x.dtype.element_ty))",
        "for k in tl.static_range(triton.cdiv(SIZES, 2)):\n        tl.store(X + k, x.to(tl.float32))",
        "tl.store(X, language.load(X))",
        "sum = x\n    tl.store(X, tl.math.exp(sum) + tl.extra.cuda.libdevice.tanh(x))",
        "tl.static_assert(SIZES % 2 == 0, 'odd')",
    ],
)
def test_what_honest_kernels_name_is_let_through(tmp_path: Path, body: str) -> None:
    looked_at(tmp_path, body)
