"""Functions of libdevice against mpmath: values and derivatives, at float64 precision."""

from __future__ import annotations

import math
import re
from pathlib import Path

import mpmath
import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from kernel_agent.ir import UnsupportedOp, execute
from kernel_agent.ir.operations.libdevice import meaning


@triton.jit
def _unary(X, Y, FUNCTION: tl.constexpr, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, FUNCTION(tl.load(X + c)))


@triton.jit
def _binary(A, B, Y, FUNCTION: tl.constexpr, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, FUNCTION(tl.load(A + c), tl.load(B + c)))


@triton.jit
def _ternary(A, B, C, Y, FUNCTION: tl.constexpr, n: tl.constexpr):
    c = tl.arange(0, n)
    tl.store(Y + c, FUNCTION(tl.load(A + c), tl.load(B + c), tl.load(C + c)))


def _call(name, *args, out=None, leaves=()):
    function = getattr(libdevice, name)

    def stub(*args):
        y = torch.empty(args[0].shape, dtype=out or args[0].dtype, device="cuda")
        {1: _unary, 2: _binary, 3: _ternary}[len(args)][(1,)](*args, y, function, args[0].numel())
        return y

    return execute(stub, args, leaves=leaves)


ANY = [-2.6, -1.0, -0.4, 0.3, 0.9, 1.7, 3.2, 6.0]
UNIT = [-0.95, -0.6, -0.2, 0.05, 0.3, 0.5, 0.8, 0.99]
POSITIVE = [0.01, 0.2, 0.5, 1.0, 1.9, 3.3, 7.7, 20.0]
WIDE = [0.01, 0.2, 0.5, 1.0, 4.9, 13.3, 27.7, 200.0]
ABOVE_ONE = [1.01, 1.2, 1.5, 2.0, 2.9, 3.3, 7.7, 20.0]
PROBABILITY = [1e-12, 1e-3, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999]

CASES = {
    "acos": (UNIT, mpmath.acos),
    "acosh": (ABOVE_ONE, mpmath.acosh),
    "asin": (UNIT, mpmath.asin),
    "asinh": (ANY, mpmath.asinh),
    "atan": (ANY, mpmath.atan),
    "atanh": (UNIT, mpmath.atanh),
    "cbrt": (ANY, lambda x: mpmath.sign(x) * mpmath.cbrt(abs(x))),
    "cosh": (ANY, mpmath.cosh),
    "cospi": (ANY, lambda x: mpmath.cospi(x)),
    "cyl_bessel_i0": (ANY, lambda x: mpmath.besseli(0, x)),
    "cyl_bessel_i1": (ANY, lambda x: mpmath.besseli(1, x)),
    "erf": (ANY, mpmath.erf),
    "erfc": (ANY, mpmath.erfc),
    "erfcinv": (PROBABILITY, lambda x: mpmath.erfinv(1 - x)),
    "erfcx": (ANY, lambda x: mpmath.exp(x * x) * mpmath.erfc(x)),
    "erfinv": (UNIT, mpmath.erfinv),
    "exp10": (ANY, lambda x: mpmath.power(10, x)),
    "exp2": (ANY, lambda x: mpmath.power(2, x)),
    "expm1": (ANY, mpmath.expm1),
    "fast_expf": (ANY, mpmath.exp),
    "fast_exp10f": (ANY, lambda x: mpmath.power(10, x)),
    "fast_log2f": (POSITIVE, lambda x: mpmath.log(x, 2)),
    "fast_log10f": (POSITIVE, mpmath.log10),
    "fast_logf": (POSITIVE, mpmath.log),
    "fast_cosf": (ANY, mpmath.cos),
    "fast_sinf": (ANY, mpmath.sin),
    "fast_tanf": (ANY, mpmath.tan),
    "rsqrt_rn": (POSITIVE, lambda x: 1 / mpmath.sqrt(x)),
    "j0": (WIDE, lambda x: mpmath.besselj(0, x)),
    "j1": (WIDE, lambda x: mpmath.besselj(1, x)),
    "lgamma": (POSITIVE, mpmath.loggamma),
    "log10": (POSITIVE, mpmath.log10),
    "log1p": (POSITIVE, mpmath.log1p),
    "normcdf": (ANY, mpmath.ncdf),
    "normcdfinv": (PROBABILITY, lambda p: -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * p)),
    "rcbrt": (POSITIVE, lambda x: 1 / mpmath.cbrt(x)),
    "rcp_rn": (ANY, lambda x: 1 / x),
    "rsqrt": (POSITIVE, lambda x: 1 / mpmath.sqrt(x)),
    "sinh": (ANY, mpmath.sinh),
    "sinpi": (ANY, lambda x: mpmath.sinpi(x)),
    "sqrt_rn": (POSITIVE, mpmath.sqrt),
    "tan": (ANY, mpmath.tan),
    "tanh": (ANY, mpmath.tanh),
    "tgamma": ([-2.6, -1.5, -0.4, 0.3, 0.9, 1.7, 3.2, 6.0], mpmath.gamma),
    "y0": (WIDE, lambda x: mpmath.bessely(0, x)),
    "y1": (WIDE, lambda x: mpmath.bessely(1, x)),
}


@pytest.mark.parametrize("name", CASES)
def test_unary_function_and_its_derivative(name):
    points, reference = CASES[name]
    only_float = name.startswith("fast_") or name == "rsqrt_rn"
    x = torch.tensor(points, dtype=torch.float32 if only_float else torch.float64)
    execution = _call(name, x, leaves=(0,))
    (slope,) = torch.autograd.grad(execution.result.sum(), [execution.leaves[0]])
    with mpmath.workdps(40):
        exact = [mpmath.mpf(v) for v in x.double().tolist()]
        values = [float(reference(v)) for v in exact]
        slopes = [float(mpmath.diff(reference, v)) for v in exact]
    torch.testing.assert_close(
        execution.result.detach(), torch.tensor(values, dtype=torch.float64), rtol=1e-13, atol=1e-14
    )
    torch.testing.assert_close(slope, torch.tensor(slopes, dtype=torch.float64), rtol=1e-12, atol=1e-13)


BINARY = {
    "atan2": (ANY, POSITIVE, mpmath.atan2),
    "div_rz": (ANY, POSITIVE, lambda a, b: a / b),
    "fdim": (ANY, POSITIVE, lambda a, b: max(a - b, 0)),
    "fmod": (ANY, POSITIVE, lambda a, b: a - b * (mpmath.floor(abs(a) / b) * mpmath.sign(a))),
    "hypot": (ANY, POSITIVE, mpmath.hypot),
    "mul_ru": (ANY, POSITIVE, lambda a, b: a * b),
    "pow": (POSITIVE, ANY, mpmath.power),
    "remainder": (ANY, POSITIVE, lambda a, b: a - b * mpmath.nint(a / b)),
    "rhypot": (ANY, POSITIVE, lambda a, b: 1 / mpmath.hypot(a, b)),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_function_and_its_derivatives(name):
    first, second, reference = BINARY[name]
    a, b = (torch.tensor(points, dtype=torch.float64) for points in (first, second))
    execution = _call(name, a, b, leaves=(0, 1))
    slopes = torch.autograd.grad(execution.result.sum(), [execution.leaves[0], execution.leaves[1]])
    with mpmath.workdps(40):
        pairs = [(mpmath.mpf(x), mpmath.mpf(y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
        values = [float(reference(x, y)) for x, y in pairs]
        wanted = [[float(mpmath.diff(reference, p, order)) for p in pairs] for order in ((1, 0), (0, 1))]
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(execution.result.detach(), torch.tensor(values, dtype=torch.float64), **close)
    for place, (ours, theirs) in enumerate(zip(slopes, wanted, strict=True)):
        message = f"derivative by argument {place} of {name}"
        torch.testing.assert_close(ours, torch.tensor(theirs, dtype=torch.float64), **close, msg=message)


@pytest.mark.parametrize(("name", "kind"), [("jn", mpmath.besselj), ("yn", mpmath.bessely)])
def test_bessel_functions_of_any_order(name, kind):
    order, x = (
        torch.tensor([0, 1, 2, 3, 5, 4, 7, 2], dtype=torch.int32),
        torch.tensor(POSITIVE, dtype=torch.float64) + 1,
    )
    execution = _call(name, order, x, out=torch.float64, leaves=(1,))
    (slope,) = torch.autograd.grad(execution.result.sum(), [execution.leaves[1]])
    with mpmath.workdps(30):
        pairs = list(zip(order.tolist(), x.tolist(), strict=True))
        values = [float(kind(n, v)) for n, v in pairs]
        slopes = [float(kind(n, v, derivative=1)) for n, v in pairs]
    torch.testing.assert_close(
        execution.result.detach(), torch.tensor(values, dtype=torch.float64), rtol=1e-10, atol=1e-14
    )
    torch.testing.assert_close(slope, torch.tensor(slopes, dtype=torch.float64), rtol=1e-10, atol=1e-14)


def _bits(value: int) -> int:
    return value % 2**32


INTEGERS = {
    "clz": lambda a: 32 - _bits(a).bit_length(),
    "popc": lambda a: bin(_bits(a)).count("1"),
    "brev": lambda a: int(f"{_bits(a):032b}"[::-1], 2),
    "ffs": lambda a: 0 if a == 0 else (_bits(a) & -_bits(a)).bit_length(),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_functions_on_the_bits_of_an_integer(name):
    a = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x0F0F00, 12345678, -98765], dtype=torch.int32)
    got = [_bits(v) for v in _call(name, a).result.tolist()]
    assert got == [INTEGERS[name](v) for v in a.tolist()]


PAIRS = {
    "mulhi": lambda a, b: (a * b) >> 32,
    "mul24": lambda a, b: ((a + 2**23) % 2**24 - 2**23) * ((b + 2**23) % 2**24 - 2**23),
    "hadd": lambda a, b: (a + b) >> 1,
    "rhadd": lambda a, b: (a + b + 1) >> 1,
}


@pytest.mark.parametrize("name", PAIRS)
def test_functions_on_two_integers(name):
    a = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7F0F00, 12345678, -98765], dtype=torch.int32)
    b = torch.tensor([7, -3, 2**31 - 1, 2**31 - 1, -(2**31), -12345, 99999, 2**30], dtype=torch.int32)
    wanted = [_bits(PAIRS[name](x, y)) for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert [_bits(v) for v in _call(name, a, b).result.tolist()] == wanted


def test_sum_of_absolute_differences_and_byte_permutation():
    a, b = (torch.tensor(v, dtype=torch.int32) for v in ([5, -7, 3, 0], [9, 4, 3, -1]))
    c = torch.tensor([1, 2, 3, 4], dtype=torch.int32).view(torch.uint32)
    assert _call("sad", a, b, c).result.tolist() == [5, 13, 3, 5]
    x = torch.full((4,), 0x03020100, dtype=torch.int32)
    y = torch.full((4,), 0x07060504, dtype=torch.int32)
    s = torch.tensor([0x3210, 0x7654, 0x0123, 0x5140], dtype=torch.int32)
    assert _call("byte_perm", x, y, s).result.tolist() == [0x03020100, 0x07060504, 0x00010203, 0x05010400]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("float2int_rn", [2, 4, -2, 2]),
        ("float2int_rz", [2, 3, -2, 1]),
        ("float2int_ru", [3, 4, -2, 2]),
        ("float2int_rd", [2, 3, -3, 1]),
        ("llrint", [2, 4, -2, 2]),
        ("llround", [3, 4, -3, 2]),
    ],
)
def test_conversions_round_as_their_names_say(name, wanted):
    x = torch.tensor([2.5, 3.7, -2.5, 1.5])
    out = torch.int64 if name.startswith("ll") else torch.int32
    assert _call(name, x, out=out).result.tolist() == wanted


def test_exponents_and_scaling():
    x = torch.tensor([0.75, -10.0, 1e-310, 2.0**60], dtype=torch.float64)
    n = torch.tensor([3, -2, 1040, 1], dtype=torch.int32)
    assert _call("ilogb", x, out=torch.int32).result.tolist() == [-1, 3, math.frexp(1e-310)[1] - 1, 60]
    assert _call("ldexp", x, n).result.tolist() == [
        math.ldexp(*pair) for pair in zip(x.tolist(), n.tolist(), strict=True)
    ]


def test_rounding_of_halves():
    x = torch.tensor([0.5, 1.5, -2.5, 0.49999999999999994], dtype=torch.float64)
    assert _call("rint", x).result.tolist() == [0.0, 2.0, -2.0, 0.0], "to even"
    assert _call("round", x).result.tolist() == [1.0, 2.0, -3.0, 0.0], "away from zero"


def test_bits_of_floats_come_back_with_their_gradient():
    @triton.jit
    def there_and_back(X, Y, n: tl.constexpr):
        c = tl.arange(0, n)
        bits = libdevice.float_as_int(tl.load(X + c))
        tl.store(Y + c, libdevice.int_as_float(bits) * 2)

    def stub(x):
        y = torch.empty_like(x)
        there_and_back[(1,)](x, y, 4)
        return y

    x = torch.tensor([0.1, -2.0, 3.0, 1e-20], dtype=torch.float64).to(torch.float32)
    execution = execute(stub, (x,), leaves=(0,))
    assert torch.equal(execution.result, x.double() * 2)
    assert torch.autograd.grad(execution.result.sum(), [execution.leaves[0]])[0].tolist() == [2.0] * 4


def test_every_function_triton_offers_is_known():
    source = Path(libdevice.__file__).read_text(encoding="utf-8")
    names = sorted(set(re.findall(r'"__nv_(\w+)"', source)))
    casts = {name for name in names if "_as_" in name} | {"nextafter", "nextafterf"}
    splits_bits = {"double2hiint", "double2loint", "hiloint2double", "rcp64h"}
    assert [name for name in names if meaning(name) is None and name not in casts] == sorted(splits_bits)


def test_a_function_that_takes_half_of_a_floats_bits_is_refused():
    with pytest.raises(UnsupportedOp, match="__nv_double2hiint"):
        _call("double2hiint", torch.ones(4, dtype=torch.float64), out=torch.int32)
