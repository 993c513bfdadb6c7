"""Functions beside a kernel: what a scan or a reduction combines two elements by, and what the library lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kernel_agent.compiler.emit.layout import bracketed
from kernel_agent.compiler.ssa.value import Block, Kernel, Op


@dataclass(frozen=True)
class Helper:
    """A device function that kernels of one module share."""

    name: str
    text: str
    """Source, with its decorator; ends with a line break."""


_LIBRARY = {
    "nan_maximum": """\
@triton.jit
def nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "nan_minimum": """\
@triton.jit
def nan_minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
""",
    "lgamma_slope": """\
@triton.jit
def lgamma_slope(x):
    # Derivative of log gamma: an asymptotic series six steps of the recurrence further up; reflected below 1/2.
    z = tl.where(x < 0.5, 1.0 - x, x)
    product = z * (z + 5.0)
    steps = (2.0 * z + 5.0) * (1.0 / product + 1.0 / (product + 4.0) + 1.0 / (product + 6.0))
    z += 6.0
    r = 1.0 / (z * z)
    series = tl.log(z) - 0.5 / z - r * (1 / 12 - r * (1 / 120 - r * (1 / 252 - r / 240)))
    angle = 3.141592653589793 * (x - tl.floor(x))
    return series - steps - tl.where(x < 0.5, 3.141592653589793 * tl.cos(angle) / tl.sin(angle), 0.0)
""",
    "linear_scan": """\
@triton.jit
def _linear_step(a_left, h_left, a_right, h_right):
    return a_left * a_right, a_right * h_left + h_right


@triton.jit
def linear_scan(a, x, axis: tl.constexpr, reverse: tl.constexpr):
    # h[i] = a[i] * h[i - 1] + x[i], from the other end where reversed
    _, h = tl.associative_scan((a, x), axis, _linear_step, reverse=reverse)
    return h
""",
    "linear_scan_before": """\
@triton.jit
def _linear_step_before(a_left, h_left, a_but_last_left, before_left, a_right, h_right, a_but_last_right, before_right):
    # the second pair composes all steps but the last
    h = a_right * h_left + h_right
    before = a_but_last_right * h_left + before_right
    return a_left * a_right, h, a_left * a_but_last_right, before


@triton.jit
def linear_scan_before(a, x, axis: tl.constexpr, reverse: tl.constexpr):
    # what linear_scan holds before each element: h[i - 1], or h[i + 1] where reversed
    start = (a, x, tl.full(a.shape, 1.0, a.dtype), tl.zeros(x.shape, x.dtype))
    _, _, _, before = tl.associative_scan(start, axis, _linear_step_before, reverse=reverse)
    return before
""",
}


def library_helper(name: str) -> Helper | None:
    """A helper that every kernel has the same text of; None for what is no such."""
    return Helper(name, _LIBRARY[name]) if name in _LIBRARY else None


def combine_helper(
    op: Op,
    name: str,
    body: Callable[[Kernel, list[str]], tuple[list[str], list[str]]],
    known: Mapping[str, Helper],
) -> Helper:
    """The function of a REDUCE or SCAN with a block of its own; one of `known` where the text is the same."""
    block = op.blocks[0]
    half = len(block.arguments) // 2
    stems = [f"{value.name or 'x'}{n if half > 1 and not value.name else ''}" for n, value in enumerate(op.operands)]
    if len(set(stems)) < half:
        stems = [f"x{n}" for n in range(half)]
    names = [f"{stem}_{side}" for side in ("left", "right") for stem in stems]
    for value, given in zip(block.arguments, names, strict=True):
        value.name = given
    inner = Kernel(name, list(block.arguments), Block([], block.ops, block.yields))
    lines, returned = body(inner, names)
    candidates = [name, *(f"{name}_{n}" for n in range(1, 1000))]
    for candidate in candidates:
        head = bracketed(f"def {candidate}", names, ":", 0)
        text = "\n".join(["@triton.jit", *head, *lines, f"    return {', '.join(returned)}", ""])
        if candidate not in known or known[candidate].text == text:
            return Helper(candidate, text)
    raise AssertionError(name)
