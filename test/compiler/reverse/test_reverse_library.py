"""Adjoints of library functions, against autograd through what the executor takes them for."""

from __future__ import annotations

import pytest
import torch
from reverse_checks import Forward, compare
from torch import Tensor

from kernel_agent.compiler.errors import CannotDerive
from kernel_agent.compiler.reverse import differentiate
from kernel_agent.compiler.reverse.rules.library import PARTS, SLOPES, STEPS
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.value import Kernel
from kernel_agent.ir.operations.libdevice import meaning

ABOVE_ONE = {"acosh"}
POSITIVE = {"pow", "fast_powf", "y0", "y1", "log10", "fast_log10f", "log1p", "rcbrt", "cbrt", "erfcinv", "normcdfinv"}
THREE, FOUR = {"norm3d", "rnorm3d"}, {"norm4d", "rnorm4d"}
WHOLE = {"powi", "ldexp", "scalbn"}
"""Their second argument is an integer."""


def calling(name: str, count: int) -> Kernel:
    """Y[i] = name(A[i], ...)."""
    elements = dict.fromkeys("ABCD"[:count], "*f32")
    if name in WHOLE:
        elements["B"] = "*i32"
    k = Forward(**elements, Y="*f32")
    b, lanes = k.b, k.b.arange(0, 8)
    values = [b.load(k.arguments[letter], lanes) for letter in elements]
    b.store(k.Y, lanes, b.elementwise(Code.CALL, values, "f32", {"function": f"libdevice.{name}"}))
    return k.kernel


def spread(name: str, seed: int) -> Tensor:
    low, high = (1.1, 3.0) if name in ABOVE_ONE else (0.15, 0.9) if name in POSITIVE else (-0.9, 0.85)
    steps = torch.linspace(low, high, 8, dtype=torch.float64)
    return steps[torch.randperm(8, generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("name", sorted(name for name in SLOPES if not name.startswith("softplus")))
def test_a_function_of_one_argument_has_the_derivative_of_its_meaning(name: str) -> None:
    function = meaning(name)
    assert function is not None
    compare(calling(name, 1), {"A": spread(name, 0)}, {"Y": (8,)}, function, tolerance=1e-9)


def test_softplus_has_the_derivative_sigmoid() -> None:
    zero = torch.zeros(8, dtype=torch.float64)
    for name, function in (("softplus", torch.logaddexp), ("softplus2", torch.logaddexp2)):
        compare(calling(name, 1), {"A": spread(name, 0) * 9}, {"Y": (8,)}, lambda x, f=function: f(x, zero))


@pytest.mark.parametrize("name", sorted(PARTS.keys() - WHOLE - {"saturatef", "nextafter"}))
def test_a_function_of_several_arguments_has_the_derivatives_of_its_meaning(name: str) -> None:
    count = 3 if name in THREE else 4 if name in FOUR else 2
    inputs = {letter: spread(name, seed) for seed, letter in enumerate("ABCD"[:count])}
    function = meaning(name)
    assert function is not None
    compare(calling(name, count), inputs, {"Y": (8,)}, function, tolerance=1e-9)


@pytest.mark.parametrize("name", sorted(WHOLE))
def test_functions_of_a_float_and_an_integer_have_a_derivative_by_the_float(name: str) -> None:
    n = torch.tensor([0, 1, 2, 3, -1, -2, 5, 1], dtype=torch.int32)
    function = meaning(name)
    assert function is not None
    compare(calling(name, 2), {"A": spread("pow", 0)}, {"Y": (8,)}, lambda x: function(x, n), integers={"B": n})


def test_saturation_keeps_the_cotangent_between_its_bounds() -> None:
    x = torch.tensor([-1.0, 0.0, 0.25, 0.5, 1.0, 1.5, 0.9, -0.1], dtype=torch.float64)
    compare(calling("saturatef", 1), {"A": x}, {"Y": (8,)}, lambda x: torch.clamp(x, 0.0, 1.0))


def test_powers_of_zero_have_torchs_derivatives() -> None:
    x = torch.tensor([0.0, 0.0, 0.0, 2.0, 3.0, 0.0, 1.0, 0.5], dtype=torch.float64)
    n = torch.tensor([0.0, 1.0, 2.0, 0.0, 1.0, 3.0, 2.5, -1.0], dtype=torch.float64)
    compare(calling("pow", 2), {"A": x, "B": n}, {"Y": (8,)}, torch.pow)


def test_steps_have_no_derivative() -> None:
    for name in sorted(STEPS & {"trunc", "round", "rint", "nearbyint"}):
        function = meaning(name)
        assert function is not None
        compare(calling(name, 1), {"A": spread(name, 0) * 5}, {"Y": (8,)}, function)


def test_a_function_without_a_rule_is_refused_by_name() -> None:
    with pytest.raises(CannotDerive, match="tgamma"):
        differentiate(calling("tgamma", 1), read=frozenset({"A"}), written=frozenset({"Y"}))
