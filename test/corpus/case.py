"""One kernel of the corpus: a stub, its arguments, and what it computes written in torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from kernel_agent.ir import ExecOptions, Finding, execute

BLOCK_POINTERS = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 9)
"""Whether this Triton still has block pointers; newer ones keep the name and refuse it."""
EXACT = 1e-10
"""Largest error relative to the largest element of the reference."""
WITH_LITERAL = 1e-6
"""The same for kernels with a literal that is rounded to f32 when the kernel is compiled."""


@dataclass(frozen=True)
class Case:
    """One kernel, or a few that belong together, behind one stub."""

    name: str
    stub: Callable[..., Any]
    make_args: Callable[[], tuple[Any, ...]]
    """Arguments of the stub; called with torch's generator seeded."""
    reference: Callable[..., Any]
    """The same function in torch; floating arguments arrive as float64 leaves, results in the stub's order."""
    wrt: tuple[int, ...] | None = None
    """Positions of the arguments to differentiate; None means every floating tensor."""
    literal: str = ""
    """The f32 literal that rounds in the kernel and so lowers the bar to 1e-6; empty where every literal is exact."""
    dtype: torch.dtype = torch.float32
    """Declared dtype that float32 arguments are rounded to before the stub and the reference see them."""

    @property
    def tolerance(self) -> float:
        """Largest relative error allowed."""
        return WITH_LITERAL if self.literal else EXACT

    def args(self, seed: int = 0) -> tuple[Any, ...]:
        """Arguments for one seed, in the declared dtype."""
        torch.manual_seed(seed)
        return tuple(tree_map(lambda arg: _rounded(arg, self.dtype), self.make_args()))


def in_dtypes(case: Case, *dtypes: torch.dtype) -> list[Case]:
    """The case with float32 arguments, and once more for each other dtype."""
    others = [replace(case, name=f"{case.name}-{str(dtype).removeprefix('torch.')}", dtype=dtype) for dtype in dtypes]
    return [case, *others]


def _rounded(arg: Any, dtype: torch.dtype) -> Any:
    """A float32 tensor in another dtype with its strides kept; anything else as it is."""
    if not isinstance(arg, Tensor) or arg.dtype != torch.float32 or dtype == torch.float32:
        return arg
    elements = arg.untyped_storage().nbytes() // arg.element_size()
    storage = torch.as_strided(arg, (elements,), (1,), 0).to(dtype)
    return storage.as_strided(arg.size(), arg.stride(), arg.storage_offset())


@dataclass(frozen=True)
class Outcome:
    """What the kernel and the reference gave for one case."""

    outputs: list[Tensor]
    expected_outputs: list[Tensor]
    gradients: dict[int, Tensor]
    """By position of the argument."""
    expected_gradients: dict[int, Tensor]
    findings: tuple[Finding, ...]


def run(case: Case, *, seed: int = 0, options: ExecOptions | None = None) -> Outcome:
    """Execute the stub and the reference and pull one random normal cotangent per floating output back through both."""
    args = case.args(seed)
    floats = [place for place, arg in enumerate(args) if isinstance(arg, Tensor) and arg.is_floating_point()]
    wrt = list(floats if case.wrt is None else case.wrt)
    exact = [
        arg.detach().double().clone().requires_grad_(k in wrt) if k in floats else arg for k, arg in enumerate(args)
    ]
    expected = _tensors(case.reference(*exact))
    execution = execute(case.stub, args, {}, leaves=wrt, options=options or ExecOptions())
    outputs = _tensors(execution.result)
    leaves = [execution.leaves[place] for place in wrt]
    gradients, expected_gradients = _pull_back(outputs, expected, leaves, [exact[place] for place in wrt])
    return Outcome(
        outputs,
        expected,
        dict(zip(wrt, gradients, strict=True)),
        dict(zip(wrt, expected_gradients, strict=True)),
        execution.findings,
    )


def _pull_back(
    outputs: list[Tensor], expected: list[Tensor], leaves: list[Tensor], exact: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    if not exact:
        return [], []
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in expected]
    return _gradients(outputs, leaves, cotangents), _gradients(expected, exact, cotangents)


def _gradients(outputs: list[Tensor], leaves: list[Tensor], cotangents: list[Tensor]) -> list[Tensor]:
    """Zero where an output does not depend on a leaf."""
    pairs = [(o, c.to(o.device)) for o, c in zip(outputs, cotangents, strict=True)]
    chosen = [(o, c) for o, c in pairs if o.is_floating_point() and o.requires_grad]
    if not chosen:
        return [torch.zeros_like(leaf) for leaf in leaves]
    given, pulled = zip(*chosen, strict=True)
    return list(torch.autograd.grad(given, leaves, pulled, allow_unused=True, materialize_grads=True))


def _tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def error(got: Tensor, want: Tensor) -> float:
    """Largest deviation relative to the largest finite element wanted; infinite where inf, NaN or shapes differ.

    Integers must be equal: their error is 0 or infinite.
    """
    got, want = got.detach(), want.detach()
    if got.shape != want.shape:
        return float("inf")
    if not want.is_floating_point():
        return 0.0 if torch.equal(got.to(torch.int64), want.to(torch.int64)) else float("inf")
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite) or not torch.equal(
        got[~finite].nan_to_num(), want[~finite].nan_to_num()
    ):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    worst = (got[finite] - want[finite].to(got.dtype)).abs().max().item()
    scale = want[finite].abs().max().item()
    return float(worst / scale if scale > 0 else (0.0 if worst == 0 else float("inf")))
