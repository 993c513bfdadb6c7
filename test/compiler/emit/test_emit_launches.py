"""Forwards of the dataset, read, printed and run beside their originals; some of them compiled for sm_90."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emit_launches import Printed, reprinted

from kernel_agent.bench.compiled import compile_build
from kernel_agent.compiler.emit import comments_above, triton_source
from kernel_agent.data import pairs_root
from kernel_agent.ir import import_module, standin
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import ShapeEntry

PAIRS = (
    "activation/gelu_bias",
    "softmax/softmax_one",
    "norm_fused/layernorm_two_outputs",
    "attention/fa_prefix_lm",
    "linear_attention/rwkv4_wkv",
    "quant/int8_dynamic_act_matmul",
    "matmul/matmul_block_diag",
)


@pytest.fixture(params=PAIRS)
def launches(request: pytest.FixtureRequest, tmp_path: Path) -> list[Printed]:
    path = pairs_root() / f"{request.param}.py"
    module = import_module(path, f"emit_{path.stem}")
    with standin():
        given = build_arguments(module, ShapeEntry(dims=dict(module.SWEEP[0])), device="cpu", seed=0)
    return reprinted(tmp_path, module.forward, *given.args, **given.kwargs)


def test_a_forward_of_the_dataset_does_what_it_did(launches: list[Printed]) -> None:
    assert launches
    for launch in launches:
        assert launch.error < 1e-9, launch.source.text


@pytest.mark.parametrize("launches", ["activation/gelu_bias", "attention/fa_prefix_lm"], indirect=True)
def test_what_is_printed_compiles_for_sm_90(launches: list[Printed]) -> None:
    launch = launches[0]
    compiled = compile_build(launch.build)
    assert compiled.problem == "", launch.source.text
    assert compiled.registers > 0


def test_bytes_without_a_sign_stay_without_one(tmp_path: Path) -> None:
    """IR does not tell uint8 from int8; the argument's type does."""
    path = tmp_path / "bytes.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef dequantised(Q, Out, BLOCK: tl.constexpr):\n"
        "    offs = tl.arange(0, BLOCK)\n    q = tl.load(Q + offs)\n"
        "    tl.store(Out + offs, tl.where(q > 100, q // 3, q % 7).to(tl.float32))\n"
    )
    module = import_module(path, "emit_bytes")

    def stub(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        module.dequantised[(1,)](q, out, BLOCK=16)
        return out

    q = torch.arange(0, 256, 16, dtype=torch.uint8)
    (launch,) = reprinted(tmp_path, stub, q, torch.zeros(16))
    assert launch.error == 0.0, launch.source.text
    assert "tl.uint8" in launch.source.text


def test_comments_stand_above_what_they_stood_above(tmp_path: Path) -> None:
    path = tmp_path / "commented.py"
    path.write_text(
        "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef scaled(X, Out, n, BLOCK: tl.constexpr):\n"
        "    # One block of columns a program,\n    # the last one cut off.\n"
        "    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    mask = cols < n\n"
        "    # noqa: what tools read\n    x = tl.load(X + cols, mask=mask)\n"
        "    # Twice.\n    tl.store(Out + cols, x * 2, mask=mask)\n"
    )
    module = import_module(path, "emit_commented")

    def stub(x: torch.Tensor, out: torch.Tensor) -> None:
        module.scaled[(2,)](x, out, 20, BLOCK=16)

    (launch,) = reprinted(tmp_path, stub, torch.ones(20), torch.zeros(20))
    text = triton_source(launch.kernel, comments=comments_above(path.read_text())).text
    assert text.count("    # One block of columns a program,\n    # the last one cut off.\n    cols = ") == 1, text
    assert text.count("    # Twice.\n    tl.store(") == 1, text
    assert "noqa" not in text
