"""Rules of operations, one module per family. Importing this package fills the registry."""

from kernel_agent.ir.operations import (
    access,
    atomics,
    bits,
    control,
    descriptors,
    floats,
    integers,
    libdevice,
    pointers,
    reduction,
    safe,
    shape,
)

__all__ = [
    "access",
    "atomics",
    "bits",
    "control",
    "descriptors",
    "floats",
    "integers",
    "libdevice",
    "pointers",
    "reduction",
    "safe",
    "shape",
]
