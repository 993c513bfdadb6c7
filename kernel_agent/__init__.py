"""kernel-agent: a Triton forward goes in, a proven Triton backward comes out.

`gradients` and `outputs` are exact for any function that launches Triton kernels, without a GPU; they load torch and
Triton when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_agent.autodiff import autodiff

if TYPE_CHECKING:
    from kernel_agent.library import gradients, outputs

__version__ = "0.1.0"
__all__ = ["__version__", "autodiff", "gradients", "outputs"]

_LIBRARY = ("gradients", "outputs")


def __getattr__(name: str) -> Any:
    if name in _LIBRARY:
        import kernel_agent.library

        return getattr(kernel_agent.library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LIBRARY})
