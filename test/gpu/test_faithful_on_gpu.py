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
FACTOR = 2.0
"""Allowed ratio of the two RMS errors, either way; 1.42 is the largest seen on an H200."""
BOTH = (Numerics.FAITHFUL, Numerics.EXACT)
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
    faithful, exact = (floats(run(stub, args, kwargs, n)) for n in BOTH)
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
    for numerics in BOTH:
        _, kept = run(images.forward, args, kwargs, numerics)
        results.append(floats(run(images.backward, (tuple(kept), *cotangents), {}, numerics)))
    compare(f"{path.stem} backward", real, *results)


def dims_of(module):
    """The first SWEEP entry without its flags."""
    return {name: value for name, value in module.SWEEP[0].items() if name != "required"}


ARITHMETIC = Path(__file__).with_name("arithmetic_kernels.py")
F8 = torch.float8_e4m3fn
DOTS = {
    "tf32": (torch.float32, "tf32", torch.float32),
    "ieee": (torch.float32, "ieee", torch.float32),
    "tf32x3": (torch.float32, "tf32x3", torch.float32),
    "bf16x3": (torch.float32, "bf16x3", torch.float32),
    "bf16x6": (torch.float32, "bf16x6", torch.float32),
    "float16": (torch.float16, "tf32", torch.float32),
    "bfloat16": (torch.bfloat16, "tf32", torch.float32),
    "float16 accumulator": (torch.float16, "tf32", torch.float16),
}


@pytest.mark.parametrize("kind", DOTS)
def test_the_error_of_a_dot_is_what_faithful_arithmetic_estimates(kind):
    # 1024 terms: float32 results show how the accumulator rounds, which results stored in 16 bits would hide.
    dtype, precision, out = DOTS[kind]
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(s, generator=generator).to(dtype) for s in ((64, 1024), (1024, 64)))
    images, module = import_module(ARITHMETIC, "images_arithmetic"), on_device(ARITHMETIC)
    faithful, exact = (floats(run(images.dot, (a, b, precision, out), {}, n)) for n in BOTH)
    real = floats(module.dot(a.cuda(), b.cuda(), precision, out))
    compare(f"dot {kind}", real, faithful, exact)


@pytest.mark.parametrize(
    ("dtype", "small"), [(torch.float16, F8), (torch.bfloat16, torch.float8_e5m2)], ids=["float16", "bfloat16"]
)
def test_casts_are_those_of_the_device_bit_for_bit(dtype, small):
    generator = torch.Generator().manual_seed(2)
    scale = 2.0 ** torch.randint(-30, 18, (4096,), generator=generator).float()
    x = torch.randn(4096, generator=generator) * scale
    x[:6] = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 65520.0, 1e-40])
    images, module = import_module(ARITHMETIC, "images_arithmetic"), on_device(ARITHMETIC)
    mine = floats(run(images.casts, (x, dtype, small), {}, Numerics.FAITHFUL))
    for name, got, real in zip(
        ("nearest", "towards zero", "8 bits"), mine, module.casts(x.cuda(), dtype, small), strict=True
    ):
        real = real.cpu().double()
        assert torch.equal(got.detach().nan_to_num(7.5), real.nan_to_num(7.5)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sums_of_16_bits_are_those_of_the_device(dtype):
    # (x + y) * y has nothing to fuse: bit for bit. The tree of a sum is the compiler's own: of the same size only.
    x, y = torch.randn(1024).to(dtype), torch.randn(1024).to(dtype)
    images, module = import_module(ARITHMETIC, "images_arithmetic"), on_device(ARITHMETIC)
    mine = run(images.narrow, (x, y), {}, Numerics.FAITHFUL).detach()
    real = module.narrow(x.cuda(), y.cuda()).cpu().double()
    assert torch.equal(mine[:-1], real[:-1])
    assert abs(float(mine[-1] - real[-1])) <= 16 * torch.finfo(dtype).eps * float(x.double().abs().sum()) / 32
