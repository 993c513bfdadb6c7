"""The faithful estimate of rounding against the rounding of a real device, for the examples and pairs with a backward.

Both errors are taken against the exact execution of the same kernels on the same values. The estimate need not be
equal: the device sums in an order of its own, fuses products into sums and approximates some functions. It must be of
the same size, because a gate that allows a multiple of it would otherwise reject honest kernels or accept wrong ones.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

from kernel_agent.ir import ExecOptions, Numerics, execute, import_module, standin
from kernel_agent.oracle import rounding_error
from kernel_agent.oracle.fit import fit_entry
from kernel_agent.pairs.arguments import build_arguments
from kernel_agent.pairs.spec import ShapeEntry
from kernel_agent.pairs.sweep import read_sweep

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAIRS = sorted((ROOT / "test" / "gate" / "pairs").glob("*.py"))
FACTOR = 4.0
"""Allowed ratio of the two RMS errors, either way."""
FLOOR = 0.1
"""Ulps of the stored type at the result's RMS: errors below are equal enough. One rounding makes 0.29."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs real kernels: needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:tl.make_block_ptr is deprecated:UserWarning"),
]


def on_device(path):
    """The file as any program would import it: its kernels run on the GPU."""
    module_spec = importlib.util.spec_from_file_location(f"real_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def small_entry(module, path):
    """The first SWEEP entry, halved until the exact executor needs seconds."""
    (entry, *_) = (entry for entry in read_sweep(module.SWEEP, path) if entry.required)
    with standin():
        build = lambda entry: build_arguments(module, entry, device="cpu", seed=0)  # noqa: E731
        return fit_entry(entry, build, max_elements=1 << 18, max_volume=1 << 23).entry


def moved(values, device):
    return tuple(v.to(device) if isinstance(v, torch.Tensor) else v for v in values)


def floats(result):
    flat = result if isinstance(result, (tuple, list)) else (result,)
    return [value for value in flat if isinstance(value, torch.Tensor) and value.is_floating_point()]


def compare(title, real, faithful, exact):
    assert len(real) == len(faithful) == len(exact) > 0
    for position, (device, rounded, truth) in enumerate(zip(real, faithful, exact, strict=True)):
        measured = rounding_error(str(position), device.cpu(), truth, device.dtype)
        estimate = rounding_error(str(position), rounded, truth, device.dtype)
        seen, expected = max(measured.rms_ulps, FLOOR), max(estimate.rms_ulps, FLOOR)
        print(f"{title} [{position}] {measured.dtype}: device {measured.rms:.2e}, estimated {estimate.rms:.2e} RMS")
        assert expected / FACTOR <= seen <= expected * FACTOR, (
            f"{title} [{position}]: the device errs by {seen:.2f} ulps RMS, estimated are {expected:.2f}"
        )
        assert measured.overflowed == estimate.overflowed, f"{title} [{position}]: overflows"


def run(function, args, kwargs, numerics):
    return execute(function, args, kwargs, options=ExecOptions(sanitize=False, numerics=numerics)).result


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_error_of_an_example_is_what_faithful_arithmetic_estimates(path):
    images, module = import_module(path, f"images_{path.stem}"), on_device(path)
    entry = small_entry(images, path)
    with standin():
        built = build_arguments(images, entry, device="cpu", seed=0)
    args, kwargs = tuple(built.args), dict(built.kwargs)
    stub = getattr(images, path.stem)
    faithful, exact = (floats(run(stub, args, kwargs, n)) for n in (Numerics.FAITHFUL, Numerics.EXACT))
    on_gpu = dict(zip(kwargs, moved(kwargs.values(), "cuda"), strict=True))
    real = floats(getattr(module, path.stem)(*moved(args, "cuda"), **on_gpu))
    compare(f"{path.stem} {entry.label}", real, faithful, exact)


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_the_error_of_a_backward_is_what_faithful_arithmetic_estimates(path):
    images, module = import_module(path, f"images_{path.stem}"), on_device(path)
    with standin():
        built = build_arguments(images, ShapeEntry(dims=dims_of(images)), device="cpu", seed=0)
    args, kwargs = tuple(built.args), dict(built.kwargs)
    torch.manual_seed(0)
    on_gpu = dict(zip(kwargs, moved(kwargs.values(), "cuda"), strict=True))
    outputs, saved = module.forward(*moved(args, "cuda"), **on_gpu)
    cotangents = tuple(torch.randn(out.shape).to(out.dtype) for out in floats(outputs))
    real = floats(module.backward(saved, *moved(cotangents, "cuda")))
    results = []
    for numerics in (Numerics.FAITHFUL, Numerics.EXACT):
        _, kept = run(images.forward, args, kwargs, numerics)
        results.append(floats(run(images.backward, (tuple(kept), *cotangents), {}, numerics)))
    compare(f"{path.stem} backward", real, *results)


def dims_of(module):
    """The first SWEEP entry without its flags."""
    return {name: value for name, value in module.SWEEP[0].items() if name != "required"}
