"""kernel-agent: a Triton forward goes in, a proven Triton backward comes out.

`gradients`, `outputs`, `sanitize` and `cost` work on any function that launches Triton kernels, without a GPU;
`standin` answers for one while such a file is imported; `differentiable` makes such a function trainable. `grad`
derives the adjoint of a function from tiles to tiles, for kernels to call; `check_tile` compares such a pair with
torch. They load torch and Triton when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernel_agent.autodiff import autodiff

if TYPE_CHECKING:
    from kernel_agent.compiler.tile.check import check_tile
    from kernel_agent.compiler.tile.gradient import grad
    from kernel_agent.ir.capture.device import standin
    from kernel_agent.ir.cost.cost import cost
    from kernel_agent.ir.sanitizer.sanitize_call import sanitize
    from kernel_agent.jit.operator import differentiable
    from kernel_agent.library import gradients, outputs

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "autodiff",
    "check_tile",
    "cost",
    "differentiable",
    "grad",
    "gradients",
    "outputs",
    "sanitize",
    "standin",
]

_LIBRARY = {
    "check_tile": "kernel_agent.compiler.tile.check",
    "cost": "kernel_agent.ir.cost.cost",
    "differentiable": "kernel_agent.jit.operator",
    "grad": "kernel_agent.compiler.tile.gradient",
    "gradients": "kernel_agent.library",
    "outputs": "kernel_agent.library",
    "sanitize": "kernel_agent.ir.sanitizer.sanitize_call",
    "standin": "kernel_agent.ir.capture.device",
}


def __getattr__(name: str) -> Any:
    if name in _LIBRARY:
        return getattr(importlib.import_module(_LIBRARY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIBRARY})
