"""The shipped examples as real kernels on a real device, against their references.

The exact tier says nothing of rounding or of what the hardware does with a kernel; this does, for the forwards we ship.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.sweep import read_sweep

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STUBS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
DOTS = {"attention", "attention_block_ptr", "grouped_gemm", "matmul"}
"""Run in float16 where no dtype is asked for: fp32 `tl.dot` cuts its operands to tf32, torch's products do not."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs real kernels: needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning"),
]


def load(name):
    module_spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def floating_outputs(result):
    flat = result if isinstance(result, (tuple, list)) else (result,)
    return [out for out in flat if isinstance(out, torch.Tensor) and out.is_floating_point()]


def in_double(values):
    return [v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in values]


@pytest.mark.parametrize("name", STUBS)
def test_example_agrees_with_its_reference_on_the_device(name):
    # Twice the error of the reference in the same dtype: an honest kernel rounds no worse at any scale.
    module = load(name)
    stub = getattr(module, name)
    entries = [entry for entry in read_sweep(module.SWEEP, EXAMPLES / f"{name}.py") if entry.required]
    for entry in entries:
        if name in DOTS:
            entry = entry.model_copy(update={"dims": {"dtype": "float16", **entry.dims}})
        arguments = build_arguments(module, entry, device="cuda", seed=0)
        mine = floating_outputs(stub(*arguments.args, **arguments.kwargs))
        honest = floating_outputs(module.reference(*arguments.args, **arguments.kwargs))
        kwargs = dict(zip(arguments.kwargs, in_double(arguments.kwargs.values()), strict=True))
        exact = floating_outputs(module.reference(*in_double(arguments.args), **kwargs))
        assert len(mine) >= len(exact) == len(honest) > 0
        for position, (got, low, truth) in enumerate(zip(mine, honest, exact, strict=False)):
            truth = truth.double()
            floor = truth.square().mean().sqrt() * 2 * torch.finfo(got.dtype).eps
            error = (got.double() - truth).abs().max()
            allowed = 2 * (low.double() - truth).abs().max() + floor
            assert error <= allowed, f"{name} {entry.label} output {position}: error {error:.2e}, allowed {allowed:.2e}"
