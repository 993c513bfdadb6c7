"""The grid of a launch: one to three sizes, as many programs as a GPU takes along each."""

from __future__ import annotations

import operator
from typing import Any

from kernel_agent.ir.errors import LaunchError

MOST_PROGRAMS = ((1 << 31) - 1, 65535, 65535)
"""Along each axis, on any NVIDIA GPU; a larger grid is an error of the driver."""


def grid_of(sizes: Any, kernel: str) -> tuple[int, int, int]:
    """The three sizes of what a kernel is launched with. Raises `LaunchError` for what is no grid of a GPU."""
    try:
        listed = [operator.index(size) for size in (sizes if isinstance(sizes, (tuple, list)) else (sizes,))]
    except TypeError as error:
        raise LaunchError(f"kernel {kernel} is launched with grid {sizes}: {error}", kernel=kernel) from error
    if not 1 <= len(listed) <= 3 or min(listed) < 0:
        raise LaunchError(f"kernel {kernel} is launched with grid {tuple(listed)}: one to three sizes are needed")
    x, y, z = (*listed, 1, 1)[:3]
    if any(size > most for size, most in zip((x, y, z), MOST_PROGRAMS, strict=True)):
        raise LaunchError(
            f"kernel {kernel} is launched with grid {(x, y, z)}: a GPU takes at most {MOST_PROGRAMS}",
            remedy="Let the longest axis be the first one, or give each program more to do.",
            kernel=kernel,
        )
    return x, y, z
