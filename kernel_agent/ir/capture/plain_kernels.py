"""Whether what launches a kernel is as Triton made it: an executor compiles the text and asks nobody what runs."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from kernel_agent.ir.errors import UnsupportedOp


def refuse_exchanged(launcher: Any) -> None:
    """Raises `UnsupportedOp` for a kernel, or a choice of configurations, that a device would run otherwise.

    No launch here compiles for a device or chooses by a clock, so what stands in caches of either was put there.
    """
    found = _exchanged_tuner(launcher) if isinstance(launcher, Autotuner) else _exchanged_kernel(launcher)
    if found:
        name = getattr(launcher, "base_fn", launcher.fn).__name__
        raise UnsupportedOp(
            f"kernel {name} {found}: what runs then is not what its text says",
            remedy="Launch what triton.jit and triton.autotune make, and leave its parts as they are.",
            kernel=name,
        )


def _exchanged_kernel(kernel: Any) -> str:
    if type(kernel) is not JITFunction:
        return f"is launched by a class of its own, {type(kernel).__name__}"
    compiled = getattr(kernel, "device_caches", None)
    if compiled is not None and (
        type(compiled) is not defaultdict or compiled or compiled.default_factory != kernel.create_binder
    ):
        return "has compiled code that was given to it"
    return _exchanged_part(kernel, JITFunction)


def _exchanged_tuner(tuner: Any) -> str:
    if type(tuner.cache) is not dict:
        return f"remembers chosen configurations in a {type(tuner.cache).__name__}"
    known = [(str(config), config.pre_hook) for config in tuner.configs]
    if any((str(chosen), getattr(chosen, "pre_hook", None)) not in known for chosen in tuner.cache.values()):
        return "was given a configuration that is none of its own"
    return _exchanged_part(tuner, type(tuner))


def _exchanged_part(launcher: Any, kind: type) -> str:
    """A method of Triton's that an object has replaced for itself."""
    for name in vars(launcher):
        if not name.startswith("__") and callable(vars(launcher)[name]) and callable(getattr(kind, name, None)):
            return f"has a `{name}` of its own"
    return ""
