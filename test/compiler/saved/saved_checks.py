"""Kernels of Triton source, run and differentiated exactly, and what their backwards read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_agent.compiler.front import kernel_of
from kernel_agent.compiler.reverse import Adjoint, differentiate
from kernel_agent.compiler.ssa.code import Code
from kernel_agent.compiler.ssa.evaluate import evaluate
from kernel_agent.compiler.ssa.memory import Evaluation
from kernel_agent.compiler.ssa.prune import prune
from kernel_agent.compiler.ssa.value import Kernel, walk
from kernel_agent.ir.lower import lower

Arguments = Mapping[str, Tensor | int | float]


def kernel_from(function: Any, signature: Mapping[str, str], **constants: Any) -> Kernel:
    """The kernel of a jitted function. `signature`: Triton's types of what is no constexpr."""
    names = function.arg_names
    types = {**signature, **dict.fromkeys(constants, "constexpr")}
    module = lower(function, types, {(names.index(name),): value for name, value in constants.items()})
    return kernel_of(module, constants=constants)


@dataclass(frozen=True)
class Backward:
    """A backward that ran."""

    kernel: Kernel
    gradients: dict[str, Tensor]
    counts: Evaluation

    def loads(self, name: str) -> int:
        """Of a tensor argument, over all its elements."""
        return int(self.counts.loaded[name].sum())

    @property
    def tapes(self) -> int:
        """Operations that remember something."""
        return self.count(Code.TAPE_STORE)

    def count(self, code: Code) -> int:
        """Operations of a kind."""
        return sum(op.code is code for op in self.kernel.ops)

    @property
    def loops(self) -> int:
        """Loops, one after the other or nested."""
        return self.count(Code.FOR)


@dataclass(frozen=True)
class Forward:
    """A forward that ran."""

    kernel: Kernel
    grid: Sequence[int]
    arguments: Arguments
    """After it."""
    read: Sequence[str]
    """Gradients are wanted of these."""
    written: Sequence[str]
    """Cotangents are given of these."""

    def backward(self, kernel: Kernel) -> Backward:
        """Of `kernel`, which computes the same as the forward, at random cotangents that are always the same."""
        return run(self.adjoint(kernel), self)

    def adjoint(self, kernel: Kernel) -> Adjoint:
        """Of `kernel`, without what nobody reads."""
        return differentiate(kernel, read=frozenset(self.read), written=frozenset(self.written))

    def forward_again(self, kernel: Kernel) -> None:
        """Assert that a kernel with numbers from memory writes what is there."""
        again = {name: x.clone() if isinstance(x, Tensor) else x for name, x in self.arguments.items()}
        evaluate(kernel, self.grid, again)
        for name in self.written:
            close(again[name], self.arguments[name], name)


def run(adjoint: Adjoint, forward: Forward) -> Backward:
    """The gradients of an adjoint."""
    torch.manual_seed(11)
    kernel = prune(adjoint.kernel)
    given = dict(forward.arguments)
    for name in sorted(adjoint.cotangents):
        given[adjoint.cotangents[name]] = torch.randn_like(tensor(given[name]))
    gradients = {name: torch.zeros_like(tensor(given[name])) for name in adjoint.gradients}
    given.update({adjoint.gradients[name]: total for name, total in gradients.items()})
    counts = evaluate(kernel, forward.grid, given)
    return Backward(kernel, gradients, counts)


def ran(
    kernel: Kernel, grid: Sequence[int], arguments: Arguments, read: Sequence[str], written: Sequence[str]
) -> Forward:
    """A forward, run on tensors that it writes in place."""
    evaluate(kernel, grid, arguments)
    return Forward(kernel, grid, arguments, read, written)


def same_gradients(one: Backward, other: Backward) -> None:
    """Assert that two backwards of one forward agree."""
    for name, expected in other.gradients.items():
        assert expected.abs().max() > 1e-3, f"the gradient of {name} is zero: the comparison says nothing"
        close(one.gradients[name], expected, f"gradient of {name}")


def close(found: Tensor | float, expected: Tensor | float, name: str) -> None:
    """To ten digits."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")


def tensor(value: Tensor | float) -> Tensor:
    """A tensor argument."""
    assert isinstance(value, Tensor)
    return value


def seeded(*shape: int, seed: int = 0) -> Tensor:
    """Random normal numbers."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def empty(*shape: int) -> Tensor:
    """NaN everywhere."""
    return torch.full(shape, torch.nan, dtype=torch.float64)


def loads_in_loops(kernel: Kernel) -> int:
    """LOADs that a loop repeats."""
    return sum(op.code is Code.LOAD for loop in kernel.ops if loop.code is Code.FOR for op in walk(loop.blocks[0]))
