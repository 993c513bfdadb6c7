"""Descriptors whose tiles a hook of the tuned configuration writes are read as if the stub had written them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from compiler.stub.torch_only import imported

from kernel_agent.compiler.derive import derive
from kernel_agent.compiler.stub.hooks import hooked_tiles
from kernel_agent.compiler.stub.trace import LaunchSeen, trace
from kernel_agent.gate.options import GateOptions
from kernel_agent.oracle import describe
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.userfile import read_file
from kernel_agent.sandbox import Sandbox

QUICK = GateOptions(seeds=(0,), max_elements=1 << 12, odd_sizes=1, max_cases=6)
FORWARD = """
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent import autodiff


def set_tiles(nargs):
    nargs["x_desc"].block_shape = [nargs["BLOCK_M"], nargs["BLOCK_N"]]
    nargs["y_desc"].block_shape = [nargs["BLOCK_M"], HOOKED]


@triton.autotune([triton.Config({"BLOCK_M": 16, "BLOCK_N": 16}, pre_hook=set_tiles)], key=["M"])
@triton.jit
def square_kernel(x_desc, y_desc, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0) * BLOCK_M
    for col in range(0, N, BLOCK_N):
        x = x_desc.load([row, col])
        y_desc.store([row, col], x * x)


@autodiff
def square(x):
    M, N = x.shape
    y = torch.empty_like(x)
    unknown = [1, 1]
    x_desc = TensorDescriptor(x, shape=[M, N], strides=[N, 1], block_shape=unknown)
    y_desc = TensorDescriptor(y, shape=[M, N], strides=[N, 1], block_shape=unknown)

    def grid(meta):
        return (triton.cdiv(M, meta["BLOCK_M"]),)

    square_kernel[grid](x_desc, y_desc, M, N)
    return y


SWEEP = [dict(M=40, N=64), dict(M=33, N=20)]


def make_args(M, N, device="cuda"):
    return (torch.randn(M, N, device=device),)
"""


def seen(folder: Path, text: str) -> tuple[LaunchSeen, ModuleType]:
    path = folder / "file.py"
    path.write_text(text)
    module = imported(path, "hooked")
    arguments = build_arguments(module, ShapeEntry(dims={"M": 40, "N": 64}), device="cpu", seed=0)
    (launch,) = trace(module.square, arguments.args, arguments.kwargs, path).launches
    return launch, module


def test_a_hook_tells_which_constexpr_an_extent_is_though_two_are_as_long(tmp_path: Path) -> None:
    # Both are 16 in the only configuration: by the numbers of the call alone a row's extent could be a column's.
    launch, module = seen(tmp_path, FORWARD.replace("HOOKED", 'nargs["BLOCK_N"]'))
    names = {"x_desc_block_0": "BLOCK_M", "x_desc_block_1": "BLOCK_N", "y_desc_block_0": "BLOCK_M"}
    assert hooked_tiles(launch, module) == {**names, "y_desc_block_1": "BLOCK_N"}


@pytest.mark.parametrize("extent", ["16", 'nargs["BLOCK_N"] // 2 + 8'])
def test_an_extent_that_a_hook_makes_of_something_else_is_no_constexpr(tmp_path: Path, extent: str) -> None:
    # It is 16 as BLOCK_N is, but another configuration's may be longer.
    launch, module = seen(tmp_path, FORWARD.replace("HOOKED", extent))
    assert "y_desc_block_1" not in hooked_tiles(launch, module)


def test_a_hook_is_found_behind_heuristics_around_the_tuner(tmp_path: Path) -> None:
    # The module's name is then the heuristics', which have no configurations.
    text = FORWARD.replace("HOOKED", 'nargs["BLOCK_N"]')
    text = text.replace("BLOCK_N: tl.constexpr)", "BLOCK_N: tl.constexpr, WIDE: tl.constexpr)")
    wide = '@triton.heuristics({"WIDE": lambda args: args["N"] > 32})'
    launch, module = seen(tmp_path, text.replace("@triton.autotune", f"{wide}\n@triton.autotune"))
    assert hooked_tiles(launch, module)["y_desc_block_1"] == "BLOCK_N"


def test_a_stub_whose_hook_writes_the_tiles_of_its_descriptors_is_derived(tmp_path: Path, sandbox: Sandbox) -> None:
    # Triton's tutorial on attention makes its descriptors so; the extents in the text, [1, 1], are not the launch's,
    # and the stub was refused.
    path = tmp_path / "forward.py"
    path.write_text(FORWARD.replace("HOOKED", 'nargs["BLOCK_N"]'))
    found = derive(describe(read_file(path), sandbox), sandbox, options=QUICK)
    assert found.verdict.green, found.verdict.message
