"""Errors of honest computations in stochastic arithmetic, one computation for every number that is drawn.

`kernel_agent.bench.narrow` says what a draw is. Every other draw holds the maxima of the forward, where the exact
gradients are the same without what passes through them: see `kernel_agent.bench.held_maxima`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kernel_agent.bench.held_maxima import HeldMaxima
from kernel_agent.bench.honest import HonestError, honest_error
from kernel_agent.bench.kinks import jumps
from kernel_agent.bench.narrow import FLOAT32_BITS, NarrowArithmetic
from kernel_agent.bench.taped import tape_of_gradients
from kernel_agent.oracle.child import Stub
from kernel_agent.pairs.arguments import Arguments

_LEAP, _LEAP_BITS = 2.0**-6, 4
"""A draw that is off by this share of a gradient, or by so many bits above those of products, took another side of a
kink; less is what rounding makes of a badly conditioned element."""
_SAME = 1e-9
"""Relative difference of exact gradients of one function, computed in two ways in float64."""


@dataclass(frozen=True)
class Draws:
    """Honest computations of the gradients of one call."""

    stub: Stub
    arguments: Arguments
    cotangents: Sequence[Tensor | None]
    truth: Mapping[str, Tensor]
    """Exact gradients."""
    dot_bits: int | None
    """Of the coarsest product of the forward."""

    def gradients(self, draw: int) -> dict[str, Tensor]:
        """Those of one draw, before they are stored."""
        held = self._held if draw % 2 else None
        with NarrowArithmetic(self.dot_bits, narrow=True, draw=draw):
            return self._taken(held)

    @cached_property
    def _held(self) -> HeldMaxima | None:
        """Who holds maxima; None where there are none, or where a gradient is another one without them."""
        if self.stub.spec.custom_gradient:
            return None
        held = HeldMaxima()
        found = self._taken(held)
        same = all((found[name] - exact).norm() <= _SAME * exact.norm() for name, exact in self.truth.items())
        return held if held.found and same else None

    def _taken(self, held: HeldMaxima | None) -> dict[str, Tensor]:
        torch.cuda.empty_cache()
        places = self.stub.leaves(self.arguments.args, self.arguments.kwargs)
        return tape_of_gradients(self.stub, self.arguments, places, held).gradients(self.cotangents)


def drawn_errors(draws: Draws, dtypes: Mapping[str, torch.dtype], numbers: range) -> dict[str, HonestError]:
    """The largest errors of the draws of these numbers, by gradient of `dtypes`, as `error_beside_jumps` has them."""
    found: dict[str, HonestError] = {}
    for number in numbers:
        drawn = draws.gradients(number)
        for name, dtype in dtypes.items():
            error = error_beside_jumps(drawn[name], draws.truth[name], dtype, draws.dot_bits)
            found[name] = found[name].joined(error) if name in found else error
    return found


def error_beside_jumps(computed: Tensor, exact: Tensor, dtype: torch.dtype, dot_bits: int | None) -> HonestError:
    """The error of a gradient that is stored in `dtype`.

    What jumps, as at a kink, says nothing of rounding elsewhere, and does not count. Where products are coarse they
    decide which side of a kink is taken, and the elements that jumped are told with the size of their jump.
    """
    bits = min(dot_bits or FLOAT32_BITS, FLOAT32_BITS)
    jumped = jumps(exact, computed, max(_LEAP, 2.0 ** (_LEAP_BITS - bits)))
    error = honest_error(torch.where(jumped, exact, computed), exact, dtype)
    if bits < FLOAT32_BITS and bool(jumped.any()):
        error = replace(error, jumps=torch.where(jumped, (computed - exact).abs(), 0.0).nan_to_num().cpu())
    return error
