"""Adjoints of tile functions in real launches: what the executor proved exactly is what a GPU computes in float32."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from kernel_agent.ir import import_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="launches real kernels: needs a CUDA device"),
]

PAGE = (Path(__file__).parents[2] / "docs" / "tile-functions.md").read_text()
FILE, _, CHECK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHAPES = ', shapes="x=[M, N], w=[N], eps=fp32"'


@pytest.mark.parametrize("shapes", [SHAPES, ""], ids=["named", "by_call"])
@pytest.mark.parametrize(("rows", "cols"), [(64, 128), (32, 1024)])
def test_kernel_around_an_adjoint_computes_gradients(tmp_path: Path, shapes: str, rows: int, cols: int) -> None:
    # derived while the kernel compiles, too: Triton's own compilation is the one that calls the compiler then
    assert FILE.count(SHAPES) == 1
    path = tmp_path / "tile_example.py"
    path.write_text(FILE.replace(SHAPES, shapes) + CHECK.split("verdict =")[0])
    module = import_module(path, f"tile_example_{rows}_{bool(shapes)}")
    torch.manual_seed(0)
    x, w, dy = (torch.randn(shape, device="cuda") for shape in ((rows, cols), (cols,), (rows, cols)))
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    module.rmsnorm_backward[(1,)](x, w, dy, dx, dw, rows, 1e-5, 8, cols)
    leaves = [tensor.double().requires_grad_() for tensor in (x, w)]
    truth = torch.autograd.grad(module.torch_rmsnorm(*leaves, 1e-5)[0], leaves, dy.double())
    for mine, theirs in zip((dx, dw), truth, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-4)
