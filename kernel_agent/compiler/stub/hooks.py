"""`hooked_tiles`: tiles of a stub's descriptors that the hook of a tuned configuration makes as long as its constexprs.

Tiles are tuned, and a stub makes its descriptors before it knows which configuration is taken: Triton's way is a
`pre_hook` that writes the extents into descriptors which the stub made with others. What such a hook does is asked of
itself: it is given numbers that no two constexprs have in common, and an extent with one of them is that constexpr's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from triton.runtime.autotuner import Autotuner
from triton.tools.tensor_descriptor import TensorDescriptor

from kernel_agent.compiler.stub.descriptors import block_names
from kernel_agent.compiler.stub.meta import around
from kernel_agent.compiler.stub.trace import LaunchSeen

_FIRST, _STEP = 1 << 20, 1 << 10
"""Numbers for constexprs: far from any tile, and apart from each other's halves and doubles."""


def hooked_tiles(seen: LaunchSeen, module: ModuleType) -> dict[str, str]:
    """By the name of an extent, `x_block_0`, the constexpr that a hook of the launch's configuration makes it."""
    hook = _hook(seen, module) if seen.descriptors else None
    if hook is None:
        return {}
    sizes = [name for name, value in seen.constants.items() if type(value) is int]
    numbers = {name: _FIRST + _STEP * place for place, name in enumerate(sizes)}
    descriptors = {name: _descriptor(seen, name, rank) for name, rank in seen.descriptors.items()}
    try:
        hook({**seen.values, **numbers, **descriptors})
    except Exception:  # the user's code, on numbers of ours: what it does to them is not known then
        return {}
    names = {number: name for name, number in numbers.items()}
    found = {}
    for name, made in descriptors.items():
        for block, extent in zip(block_names({name: seen.descriptors[name]}), made.block_shape, strict=False):
            if extent in names:
                found[block] = names[extent]
    return found


def _hook(seen: LaunchSeen, module: ModuleType) -> Callable[[Mapping[str, Any]], object] | None:
    """Of the configuration that a launch was tuned to."""
    tuners = (one for one in around(seen.kernel, module) if isinstance(one, Autotuner))
    configs = (config for tuner in tuners for config in tuner.configs)
    taken = (config for config in configs if all(seen.values.get(key) == one for key, one in config.kwargs.items()))
    config = next(taken, None)
    return None if config is None else config.pre_hook


def _descriptor(seen: LaunchSeen, name: str, rank: int) -> TensorDescriptor:
    """A descriptor for a hook to write to; what Triton asks of a real one's memory is not asked."""
    made: TensorDescriptor = object.__new__(TensorDescriptor)
    made.base, made.block_shape = seen.values[name], [1] * rank
    made.shape, made.strides = (
        [seen.values[f"{name}_{what}_{axis}"] for axis in range(rank)] for what in ("shape", "stride")
    )
    return made
