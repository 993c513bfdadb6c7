"""In what arithmetic kernels are executed."""

from __future__ import annotations

import enum


class Numerics(str, enum.Enum):
    """Arithmetic of an execution."""

    EXACT = "EXACT"
    """Every float is a float64 whatever the kernel declares; nothing rounds. What gradients are taken from."""
    FAITHFUL = "FAITHFUL"
    """Every operation rounds to the type its IR declares, as the device would; see `operations.faithful`. Tells what
    rounding costs an honest kernel. Nothing is recorded for gradients: the user's backward is run instead."""
