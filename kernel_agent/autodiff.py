"""`@autodiff` marks the stub whose backward is wanted and records which inputs need gradients.

It changes nothing about the function, so that a decorated file runs exactly as before, with two exceptions:
`@autodiff(backward="generated/x_backward.py")` makes the stub train through a delivered pair, and `@autodiff(jit=True)`
through backwards that are derived when they are first needed.
Imports nothing heavy: user files import this module on machines without torch configured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

Stub = TypeVar("Stub", bound=Callable[..., Any])

MARK = "__kernel_agent_autodiff__"
"""The attribute that carries an `AutodiffMark` on a decorated stub."""


@dataclass(frozen=True)
class AutodiffMark:
    """What the user declared about one stub."""

    inputs_require_grad: tuple[int | str, ...] | None
    """Argument positions or names that need gradients; None means every floating tensor argument."""
    nondiff_outputs: tuple[int, ...]
    """Positions of outputs without gradient, such as saved statistics."""
    backward: str | None
    """Path of a delivered pair to train with, or None."""
    jit: bool = False
    """Whether backwards are derived at the first call."""


@overload
def autodiff(stub: Stub, /) -> Stub: ...
@overload
def autodiff(
    *,
    inputs_require_grad: tuple[int | str, ...] | None = None,
    nondiff_outputs: tuple[int, ...] = (),
    backward: str | os.PathLike[str] | None = None,
    jit: bool = False,
) -> Callable[[Stub], Stub]: ...


def autodiff(
    stub: Stub | None = None,
    /,
    *,
    inputs_require_grad: tuple[int | str, ...] | None = None,
    nondiff_outputs: tuple[int, ...] = (),
    backward: str | os.PathLike[str] | None = None,
    jit: bool = False,
) -> Stub | Callable[[Stub], Stub]:
    """Mark a stub for differentiation. Bare, or with `inputs_require_grad=` as positions or names.

    With `jit=True` the stub trains out of the box: it becomes what `kernel_agent.differentiable` makes of it.

    Raises `TypeError` when given a Triton kernel instead of the Python function that launches it, or both `backward`
    and `jit`.
    """
    mark = AutodiffMark(
        None if inputs_require_grad is None else tuple(inputs_require_grad),
        tuple(nondiff_outputs),
        None if backward is None else os.fspath(backward),
        jit,
    )
    if jit and backward is not None:
        raise TypeError("@autodiff takes a delivered pair (backward=...) or derives one (jit=True), not both")

    def attach(function: Stub) -> Stub:
        if hasattr(function, "run") and hasattr(function, "fn"):
            raise TypeError(
                "@autodiff belongs on the stub that launches the kernel, not on the @triton.jit kernel itself"
            )
        if mark.backward is not None:
            from kernel_agent.deliver.attach import train_through

            function = train_through(function, mark)
        if mark.jit:
            from kernel_agent.jit.operator import Differentiable

            return cast(Stub, Differentiable(function, mark=mark))
        setattr(function, MARK, mark)
        return function

    return attach if stub is None else attach(stub)


# `import kernel_agent.autodiff` hands out the function, because the package exports it under the module's name; files
# that go on to write `kernel_agent.autodiff.autodiff` mean the same function.
setattr(autodiff, "autodiff", autodiff)  # noqa: B010
