"""Forward kernels built by hand, and the comparison of their adjoints with torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernel_agent.compiler.reverse import Adjoint, differentiate
from kernel_agent.compiler.ssa.builder import Builder
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.value import Kernel, Value
from kernel_agent.compiler.ssa.verify import verify

Number = int | float


class Forward:
    """A kernel under construction: `k = Forward(X="*f32", n="i32")`, then `k.b` and `k.X`."""

    def __init__(self, **arguments: str) -> None:
        self.arguments = {name: Value(element, (), name) for name, element in arguments.items()}
        self.kernel = Kernel("forward", list(self.arguments.values()))
        self.b = Builder(self.kernel)

    def __getattr__(self, name: str) -> Value:
        return self.arguments[name]

    def rows(self, extent: int) -> Value:
        """pid * extent + lanes."""
        b = self.b
        return b.add(b.mul(b.program_id(0), b.const(extent)), b.arange(0, extent))


def compare(
    kernel: Kernel,
    inputs: Mapping[str, Tensor],
    outputs: Mapping[str, Sequence[int]],
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    *,
    grid: Sequence[int] = (1,),
    integers: Mapping[str, Number | Tensor] | None = None,
    tolerance: float = 1e-10,
) -> Adjoint:
    """Assert that forward and gradients of a kernel are those of a torch function of its inputs.

    `inputs`: float64 tensors, or of no dimension for scalar arguments, all of which gradients are wanted of; `outputs`:
    shapes. `reference` takes the inputs in order, and returns what is written in order. Cotangents are random.
    """
    torch.manual_seed(7)
    others = dict(integers or {})
    scalars = frozenset(name for name in inputs if not kernel.argument(name).is_pointer)
    given = {name: x.clone() for name, x in inputs.items()}
    written = {name: torch.full(tuple(shape), torch.nan, dtype=torch.float64) for name, shape in outputs.items()}
    verify(kernel)
    evaluate(kernel, grid, {**given, **written, **others})
    leaves = [x.clone().requires_grad_() for x in inputs.values()]
    expected = reference(*leaves)
    expected = expected if isinstance(expected, tuple) else (expected,)
    for (name, found), wanted in zip(written.items(), expected, strict=True):
        torch.testing.assert_close(found, wanted.detach(), msg=f"forward: {name}", rtol=1e-10, atol=1e-10)
    cotangents = {name: torch.randn(tuple(shape), dtype=torch.float64) for name, shape in outputs.items()}
    truth = torch.autograd.grad(expected, leaves, list(cotangents.values()), allow_unused=True)
    adjoint = differentiate(kernel, read=frozenset(inputs) - scalars, written=frozenset(outputs), scalars=scalars)
    gradients = gradients_of(adjoint, grid, {**given, **written, **others}, cotangents)
    for name, wanted in zip(inputs, truth, strict=True):
        wanted = torch.zeros_like(inputs[name]) if wanted is None else wanted
        torch.testing.assert_close(
            gradients[name].view_as(wanted), wanted, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}"
        )
    return adjoint


def gradients_of(
    adjoint: Adjoint, grid: Sequence[int], arguments: Mapping[str, Tensor | Number], cotangents: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Run an adjoint kernel: the gradient of every input, float64."""
    verify(adjoint.kernel)
    found: dict[str, Tensor] = {}
    for name in adjoint.gradients:
        held = arguments[name]
        found[name] = torch.zeros(held.shape if isinstance(held, Tensor) and held.dim() else 1, dtype=torch.float64)
    evaluate(
        adjoint.kernel,
        grid,
        {
            **arguments,
            **{adjoint.cotangents[name]: cotangent.clone() for name, cotangent in cotangents.items()},
            **{adjoint.gradients[name]: buffer for name, buffer in found.items()},
        },
    )
    return found
